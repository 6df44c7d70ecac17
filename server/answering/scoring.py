"""Scores of how well texts match: pairs read by a cross-encoder, or the similarity of text vectors, token vectors or
sparse vectors."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine import Pooled, PoolingParams
from engine.pooled import SIDES, Comparer, SideReading, compared_side, is_cross_encoder, prompt_tokens, side_prompt
from engine.text.processor import Encoding
from server.answering.encoding import Text, compact, compact_input, encode_all, estimate, need_tokenizer
from server.answering.pooling import PoolingInput, PoolingRun


@dataclass(frozen=True, slots=True)
class Side:
    """One side of the pairs."""

    param: str  # the request's field with its texts
    texts: Sequence[str]
    # maximum tokens of each text, without special ones; texts are cut to it first; None or 0: no limit
    most: int | None = None
    name: str | None = None  # the name of its texts in errors, if it differs


@dataclass(slots=True)
class ScoringRun(PoolingRun):
    """A request whose answer is made of scores of pairs."""

    first: Side = field(kw_only=True)  # the first text of each pair; a single one is used for all pairs
    second: Side = field(kw_only=True)  # the second text of each pair
    truncate: int | None = field(kw_only=True)  # the number of tokens to cut an input to, if any
    use_activation: bool | None = field(kw_only=True)  # False returns the raw number of a cross-encoder's head
    _vectors: list[tuple[int, int]] = field(default_factory=list)  # for each pair, the inputs of its two texts

    def size(self) -> int:
        texts: list[Text] = [*self._pairs()] if self._crosses else [*self.first.texts, *self.second.texts]
        return estimate(texts, self.service.client.info)

    async def inputs(self) -> list[PoolingInput]:
        with self._public_names():
            self.first, self.second = await self._cut(self.first), await self._cut(self.second)
            return await (self._joined() if self._crosses else self._apart())

    async def _joined(self) -> list[PoolingInput]:
        params = PoolingParams(task="classify", use_activation=self.use_activation)
        return await encode_all(
            self.service,
            self._pairs(),
            lambda encoding, pair: PoolingInput(compact_input(self.service, encoding, pair), params),
            self.second.param,
            name=f"the pair with {self.second.name or self.second.param}",
            truncate=self.truncate,
            advice=self.advice,
        )

    async def _apart(self) -> list[PoolingInput]:
        """Each distinct text as one input, however many pairs contain it; records which inputs belong to each pair."""
        info = self.service.client.info
        tokenizer = need_tokenizer(self.service, self.first.param)
        task = Comparer(info).task
        places: dict[tuple[bytes, PoolingParams], int] = {}
        inputs: list[PoolingInput] = []
        sides: list[list[int]] = []
        for side, name in zip((self.first, self.second), SIDES, strict=True):
            prompt, reading = side_prompt(info, name), compared_side(info, tokenizer, name)
            params = PoolingParams(task=task, skip_tokens=prompt_tokens(tokenizer, info, prompt))

            def place_of(
                encoding: Encoding, text: Text, reading: SideReading = reading, params: PoolingParams = params
            ) -> int:
                """The index of the text's input; equal texts share one."""
                source, asked = reading.complete(compact_input(self.service, encoding, text), params, self.truncate)
                source = compact(source, self.service.settings)
                place = places.setdefault((array("i", source.token_ids).tobytes(), asked), len(places))
                if place == len(inputs):
                    inputs.append(PoolingInput(source, asked))
                return place

            sides.append(
                await encode_all(
                    self.service,
                    [prompt + text for text in side.texts],
                    place_of,
                    side.param,
                    name=side.name,
                    truncate=reading.limit(self.truncate),
                    marker=reading.marker,
                    advice=self.advice,
                )
            )
        first, second = sides
        self._vectors = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
        return inputs

    def scores(self, answers: Sequence[Pooled]) -> list[float]:
        if self._crosses:
            return [float(answer.values()[0, 0]) for answer in answers]
        comparer = Comparer(self.service.client.info)
        return [comparer.score(answers[a], answers[b]) for a, b in self._vectors]

    def public_name(self, param: str | None) -> str | None:
        """The client's name for one of the engine's inputs: a second text, with or without a preceding first one."""
        return self.second.param if param == "input" else param

    async def _cut(self, side: Side) -> Side:
        if not side.most or side.most >= self.service.client.info.max_model_len:
            return side
        tokenizer = need_tokenizer(self.service, side.param)

        def kept(encoding: Encoding, text: Text) -> str:
            assert isinstance(text, str)
            if not encoding.truncated:
                return text
            if encoding.offsets is None:
                return tokenizer.decode(encoding.ids)
            return text[encoding.offsets[0][0] : encoding.offsets[-1][1]]

        texts = await encode_all(
            self.service,
            side.texts,
            kept,
            side.param,
            add_special_tokens=False,
            truncate=side.most,
            may_be_empty=True,  # the model decides how short a text may be
        )
        return replace(side, texts=texts)

    @property
    def _crosses(self) -> bool:
        return is_cross_encoder(self.service.client.info)

    def _pairs(self) -> list[tuple[str, str]]:
        first, second = self.first.texts, self.second.texts
        return list(zip([*first] * len(second) if len(first) == 1 else first, second, strict=True))
