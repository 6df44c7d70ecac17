"""Scores of how well texts go together: pairs read by a cross-encoder, or the similarity of vectors: of texts, of
tokens, or sparse ones."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine import Pooled, PoolingParams
from engine.pooled import (
    SIDES,
    Comparer,
    SideReading,
    compared_side,
    is_cross_encoder,
    prompt_tokens,
    side_prompt,
)
from engine.text.processor import Encoding
from server.answering.encoding import Text, compact, compact_input, encode_all, estimate, need_tokenizer
from server.answering.pooling import PoolingInput, PoolingRun


@dataclass(frozen=True, slots=True)
class Side:
    """One side of the pairs.

    Attributes:
        param: the field that its texts came in.
        name: of its texts in refusals, if it is another one.
        most: to how many tokens each is cut, special ones not counted, before anything else; None or 0: not at all.
    """

    param: str
    texts: Sequence[str]
    most: int | None = None
    name: str | None = None


@dataclass(slots=True)
class ScoringRun(PoolingRun):
    """A request whose answer is made of the scores of pairs.

    Attributes:
        first: the first of each pair; a single one goes with all.
        second: the second of each.
        truncate: how many tokens an input is cut to, if it is.
        use_activation: False: the number that a cross-encoder's head gives.
    """

    first: Side = field(kw_only=True)
    second: Side = field(kw_only=True)
    truncate: int | None = field(kw_only=True)
    use_activation: bool | None = field(kw_only=True)
    _vectors: list[tuple[int, int]] = field(default_factory=list)  # of each pair: which inputs its texts are

    def size(self) -> int:
        texts: list[Text] = [*self._pairs()] if self._crosses else [*self.first.texts, *self.second.texts]
        return estimate(texts, self.service.client.info)

    async def inputs(self) -> list[PoolingInput]:
        with self._public_names():
            self.first, self.second = await self._cut(self.first), await self._cut(self.second)
            return await (self._joined() if self._crosses else self._apart())

    async def _joined(self) -> list[PoolingInput]:
        """Each pair as one input."""
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
        """Each text as one input, read once, however many pairs it is in; notes which they are."""
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
                """The index of the text's input: equal texts share one."""
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
        """One score for each pair."""
        if self._crosses:
            return [float(answer.values()[0, 0]) for answer in answers]
        comparer = Comparer(self.service.client.info)
        return [comparer.score(answers[a], answers[b]) for a, b in self._vectors]

    def public_name(self, param: str | None) -> str | None:
        """A client's name for one of the engine's inputs: a second text, with or without the first before it."""
        return self.second.param if param == "input" else param

    async def _cut(self, side: Side) -> Side:
        """The side with its texts cut to their longest allowed length."""
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
            may_be_empty=True,  # how little a text may hold is for what the model reads to decide
        )
        return replace(side, texts=texts)

    @property
    def _crosses(self) -> bool:
        return is_cross_encoder(self.service.client.info)

    def _pairs(self) -> list[tuple[str, str]]:
        first, second = self.first.texts, self.second.texts
        return list(zip([*first] * len(second) if len(first) == 1 else first, second, strict=True))
