"""The answers to pooling requests: from the engine's matrices to vectors, scores, classes, spans and named tokens. Both
`LLM` and the server use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from engine.errors import InvalidRequestError
from engine.interface.outputs import EngineInfo, Pooled
from engine.interface.pooling import DEFAULT_THRESHOLD, MAX_LABELS
from engine.interface.request import TokenInput
from engine.interface.token_sides import read_sides
from engine.interface.values import NumberRange, check_number
from engine.pooled.answers import (
    DEFAULT_ANSWER_LENGTH,
    DEFAULT_ANSWERS,
    MAX_ANSWER_LENGTH,
    MAX_ANSWERS,
    MAX_WINDOWS,
    Answer,
    AnswerTerms,
    answers_of,
    read_question,
    windows_of,
)
from engine.pooled.comparing import Comparer, compared_side, comparison_of, cosine, side_prompt, sparse_of
from engine.pooled.entities import Entity, EntityReading, EntityTerms, entities_of, read_entities
from engine.pooled.prompts import find_prompt, prompt_tokens
from engine.pooled.sides import PLAIN, SIDES, SideReading, check_sides, read_side
from engine.pooled.spans import AGGREGATIONS, Aggregation, Span, check_aggregation, spans_of
from engine.text.encoding import Encoding, Side, cut
from engine.text.tokenizer import Tokenizer

__all__ = [
    "AGGREGATIONS", "DEFAULT_ANSWERS", "DEFAULT_ANSWER_LENGTH", "DEFAULT_THRESHOLD", "MAX_ANSWERS", "MAX_ANSWER_LENGTH",
    "MAX_LABELS", "MAX_WINDOWS", "PLAIN", "SIDES", "Aggregation", "Answer", "AnswerOutput", "AnswerTerms",
    "ClassificationOutput", "Comparer", "EmbeddingOutput", "EntitiesOutput", "Entity", "EntityReading", "EntityTerms",
    "FillMaskOutput", "LabelScore", "MaskedToken", "PoolingOutput", "ScoreOutput", "SideReading", "Span",
    "TokenClassificationOutput", "answers_of", "check_aggregation", "check_scores", "check_sides",
    "compared_side", "comparison_of", "cosine", "entities_of", "find_prompt", "is_cross_encoder", "labels_of",
    "longest", "mask_positions", "masks_of", "prompt_tokens", "read_entities", "read_question", "read_side",
    "side_prompt", "sides_of", "spans_of", "sparse_of", "token_input", "vector_of", "windows_of",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class LabelScore:
    """A class and its score."""

    label: str
    score: float


@dataclass(frozen=True, slots=True)
class MaskedToken:
    """A possible token at the position of a mask.

    Attributes:
        token: its text within a text.
        token_id: its id.
        score: its probability there.
        sequence: the whole input, decoded with the token in place of the mask. Special tokens are shown only if the
            input has other masks.
    """

    token: str
    token_id: int
    score: float
    sequence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOutput:
    """The common fields of all answers."""

    prompt_token_ids: list[int] = field(repr=False)  # the input's tokens as the model read them

    @property
    def outputs(self) -> Self:
        """The answer itself, for vLLM's attribute path."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput(PoolingOutput):
    """One input's vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Features of the vector (vLLM's name)."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOutput(PoolingOutput):
    """A score of how well two texts match: a cross-encoder's score, or the cosine of their vectors.

    Attributes:
        score: for a cross-encoder, the value after its activation.
        prompt_token_ids: a cross-encoder's input; for embeddings, the tokens of both texts, one after the other.
    """

    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationOutput(PoolingOutput):
    """One input's classes.

    Attributes:
        probs: a score per class, in the model's order; usually probabilities, unless the model's config or the caller
            sets otherwise.
        labels: the names of the classes.
    """

    probs: list[float]
    labels: list[LabelScore]

    @property
    def num_classes(self) -> int:
        """The number of classes (vLLM's name)."""
        return len(self.probs)

    @property
    def label(self) -> str:
        """The class with the highest score."""
        return max(self.labels, key=lambda entry: entry.score).label


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClassificationOutput(PoolingOutput):
    """The classes of one input's tokens.

    Attributes:
        spans: the spans found in the text; for an input of ids, without positions in the text.
        probs: a score per token (including special ones) and class.
    """

    spans: list[Span]
    probs: list[list[float]] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FillMaskOutput(PoolingOutput):
    """The most probable tokens for each mask of one input, in the order of the masks."""

    masks: list[list[MaskedToken]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntitiesOutput:
    """The entities of one text, in the order of their beginnings."""

    entities: list[Entity]
    num_windows: int  # number of windows in which the text was read


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOutput:
    """The answers to one question, best first."""

    answers: list[Answer]
    num_windows: int  # number of windows in which the context was read


def vector_of(pooled: Pooled) -> list[float]:
    """The vector in the answer to a request with the task "embed"."""
    vector: list[float] = pooled.values()[0].tolist()
    return vector


def labels_of(pooled: Pooled, info: EngineInfo) -> list[LabelScore]:
    """The classes in the answer to a request with the task "classify", in the model's order."""
    return [LabelScore(*entry) for entry in zip(info.labels, pooled.values()[0].tolist(), strict=True)]


def masks_of(pooled: Pooled, encoding: Encoding, tokenizer: Tokenizer) -> list[list[MaskedToken]]:
    """The tokens in the answer to a request with the task "fill_mask", decoded as in transformers' FillMaskPipeline:
    for each mask, in order, the most probable ones first."""
    places = mask_positions(encoding, tokenizer)
    answers = []
    for place, scores, tokens in zip(places, pooled.values().tolist(), pooled.token_ids().tolist(), strict=True):
        row = []
        for score, token in zip(scores, tokens, strict=True):
            filled = [*encoding.ids[:place], token, *encoding.ids[place + 1 :]]
            filled = [id for id in filled if id != tokenizer.pad_token_id]
            sequence = tokenizer.decode_tidy(filled, skip_special_tokens=len(places) == 1)
            row.append(MaskedToken(tokenizer.decode_tidy([token], skip_special_tokens=False), token, score, sequence))
        answers.append(row)
    return answers


def mask_positions(encoding: Encoding, tokenizer: Tokenizer) -> list[int]:
    """The positions of an input's masks. Raises InvalidRequestError if there are none, or the tokenizer has no mask
    token."""
    if tokenizer.mask_token_id is None:
        raise InvalidRequestError(
            "the model's tokenizer has no mask token. Set mask_token in its tokenizer_config.json.",
            param="input",
            code="no_mask_token",
        )
    places = [at for at, token in enumerate(encoding.ids) if token == tokenizer.mask_token_id]
    if not places:
        cut = " in the part that truncate_prompt_tokens keeps" if encoding.truncated else ""
        raise InvalidRequestError(
            f"the input has no {tokenizer.mask_token}{cut}: write {tokenizer.mask_token} (token id "
            f"{tokenizer.mask_token_id}) in place of each token to predict.",
            param="input",
            code="no_mask_token",
        )
    return places


def is_cross_encoder(info: EngineInfo) -> bool:
    """Whether the model reads two texts together and gives them one score."""
    return "classify" in info.tasks and len(info.labels) == 1


def check_scores(info: EngineInfo) -> None:
    """Refuse to compare texts with a model that does not support it. Raises InvalidRequestError: gives the reason, and
    the supported tasks."""
    if is_cross_encoder(info) or comparison_of(info) is not None:
        return
    lacks = (
        f"its head has {len(info.labels)} classes, but a cross-encoder's returns a single score"
        if "classify" in info.tasks
        else "it returns neither vectors to compare nor one score for a pair"
    )
    raise InvalidRequestError(
        f"this model cannot serve score: {lacks}. It serves {', '.join(info.tasks)}.",
        param="task",
        code="unsupported_task",
    )


def longest(truncate_prompt_tokens: int | None, info: EngineInfo) -> int | None:
    """The number of tokens to cut inputs to; None for not at all. -1 means the model's limit, as in vLLM. Raises
    InvalidRequestError if the number is invalid, or exceeds the model's limit."""
    name, limit = "truncate_prompt_tokens", info.max_model_len
    check_number(name, truncate_prompt_tokens, NumberRange(low=-1, integer=True))
    if truncate_prompt_tokens == -1:
        return limit
    if truncate_prompt_tokens == 0 or (truncate_prompt_tokens or 0) > limit:
        raise InvalidRequestError(
            f"{name} is {truncate_prompt_tokens}; it must be at least 1 and at most {limit} (max_model_len), or -1 for "
            "that limit.",
            param=name,
            code="invalid_value",
        )
    return truncate_prompt_tokens


def sides_of(
    sides: Mapping[str, Any], count: int, info: EngineInfo, max_length: int | None, side: Side
) -> dict[str, Sequence[Any]]:
    """The sides of an input with this many tokens, cut like these. Raises InvalidRequestError if the number of entries
    differs, or a side is not one of the model's."""
    read_sides(sides, count, info.sides)
    if max_length is None:
        return dict(sides)
    return {name: cut([*entries], max_length, side) for name, entries in sides.items()}


def token_input(encoding: Encoding, info: EngineInfo, text: str | None = None) -> TokenInput:
    """An input for the engine. Segments are left out if the model has none, or if the tokenizer does not give them. A
    text is padded for a model that reads texts of one length; an input of ids is not."""
    ids = encoding.ids
    if text is not None and info.filler is not None:
        ids = ids + [info.filler] * (info.max_model_len - len(ids))
    tells_apart = info.sides.get("token_types", 0) > 1
    return TokenInput(ids, text, encoding.type_ids if tells_apart and any(encoding.type_ids) else None)
