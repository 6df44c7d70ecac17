"""Requests for results other than generated text: vectors, classes, masked tokens, times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from engine.errors import InvalidRequestError
from engine.interface.outputs import Alignment, EngineInfo, PoolingMode, Task
from engine.interface.values import NumberRange, brief, check_number, fail

DEFAULT_TOP_K = 5
MAX_TOP_K = 1000
DEFAULT_THRESHOLD = 0.5
MAX_LABELS = 1000  # maximum labels of entities in one request

_POOLING_TASKS = tuple(task for task in get_args(Task) if task != "generate")
_MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)
# The missing part of a model that does not support a task.
_LACKS = {
    "generate": "it has no language-model head on a decoder",
    "reward": "it has no head that scores texts or tokens",
    "embed": "its head does not return vectors",
    "classify": "it has no head that classifies texts",
    "token_classify": "it has no head that classifies tokens",
    "answer": "it has no head that finds answers",
    "entities": "it has no head that finds entities by labels",
    "fill_mask": "it has no masked-language-model head",
    "token_embed": "it is not a text encoder that returns vectors",
    "sparse_embed": "it has neither a masked-language-model head nor a layer that weighs tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """The parameters of a pooling request: the wanted result of an input's hidden states.

    Attributes:
        task: "embed" one vector; "classify" class scores of the whole input; "token_classify" class scores of each
            token; "answer" two numbers per token, for the beginning and the end of an answer; "entities" scores of
            spans of words for labels in the input; "fill_mask" the most probable tokens at some positions;
            "token_embed" a vector per token; "sparse_embed" weights of tokens; "align" the positions in its input at
            which an encoder-decoder speech model hears the given decoder tokens, by attention and dynamic time warping
            (arXiv:2212.04356, as in OpenAI's program).
        pooling: embed: the mean over all tokens, the vector of the first token ("cls") or of the last, or one of the
            rarer kinds of sentence-transformers: the largest value of each feature ("max"), the sum divided by the root
            of the length, the mean weighted by position. None: the model's own setting.
        normalize: embed, token_embed: divide each vector by its Euclidean norm. None: the model's own setting.
        dimensions: embed: keep this many of the first features (before the norm; arXiv:2205.13147).
        use_activation: classify, token_classify: return probabilities (or the activation of the model's config), not
            the head's raw numbers. None: true.
        positions: fill_mask: indices of the tokens to predict; entities: indices of the tokens for labels.
        words: entities: the index of each word's first token.
        threshold: entities: report pairs of a span and a label whose score, from 0 to 1, is above this (0.5).
        top_k: fill_mask: number of most probable tokens to report (5).
        skip_tokens: embed: leave this many tokens at the beginning, such as an instruction, out of the vector. If there
            is only one token, nothing is left out. align: this many tokens at the beginning are the given start of the
            answer, and are not aligned.
        left_out: token_embed: indices of tokens without a vector.
        attended: token_embed, for models whose queries are filled up with masks (`SideInfo.filled`): tokens attend only
            to this many first tokens; later ones attend to these, and none attends to the later ones. None: tokens
            attend to all.
        encoder_length: align: this many first positions of the encoder contain sound; None: all.
    """

    task: Task = "embed"
    pooling: PoolingMode | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    positions: Sequence[int] | None = None
    words: Sequence[int] | None = None
    threshold: float | None = None
    top_k: int | None = None
    skip_tokens: int = 0
    left_out: Sequence[int] | None = None
    attended: int | None = None
    encoder_length: int | None = None

    def __post_init__(self) -> None:
        if self.task not in _POOLING_TASKS:
            fail("task", f"task must be one of {', '.join(_POOLING_TASKS)}, got {brief(self.task)}.")
        if self.pooling is not None and self.pooling not in _MODES:
            fail("pooling", f"pooling must be one of {', '.join(_MODES)}, got {brief(self.pooling)}.")
        for name in ("normalize", "use_activation"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                fail(name, f"{name} must be true or false, got {brief(value)}.")
        check_number("dimensions", self.dimensions, NumberRange(low=1, integer=True))
        check_number("top_k", self.top_k, NumberRange(low=1, high=MAX_TOP_K, integer=True))
        check_number("skip_tokens", self.skip_tokens, NumberRange(low=0, integer=True, optional=False))
        check_number("attended", self.attended, NumberRange(low=1, integer=True))
        check_number("encoder_length", self.encoder_length, NumberRange(low=1, integer=True))
        check_number("threshold", self.threshold, NumberRange(low=0, high=1))
        for name in ("positions", "words", "left_out"):
            if (places := getattr(self, name)) is not None:
                _check_places(name, places)
        if self.task == "fill_mask" and not self.positions:
            fail("positions", "fill_mask needs the positions of the tokens to predict.")
        if self.task == "entities" and not (self.positions and self.words):
            fail("positions" if self.words else "words", "entities needs the positions of labels and of words.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """`PoolingParams` with all defaults filled in (see `resolve_pooling`).

    `modes` are poolings whose vectors are concatenated; `alignment` is only for the task "align".
    """

    task: Task
    modes: tuple[PoolingMode, ...] = ()
    normalize: bool = False
    dimensions: int | None = None
    use_activation: bool = True
    positions: tuple[int, ...] = ()
    words: tuple[int, ...] = ()
    threshold: float = DEFAULT_THRESHOLD
    top_k: int = DEFAULT_TOP_K
    skip_tokens: int = 0
    left_out: tuple[int, ...] = ()
    attended: int | None = None
    alignment: Alignment | None = None
    encoder_length: int | None = None

    @property
    def needs_all(self) -> bool:
        """Whether hidden states of all tokens are needed, so that none may come from the prefix cache."""
        return self.task != "embed" or self.modes != ("last",)


def resolve_pooling(params: PoolingParams, info: EngineInfo, *, prompt_len: int) -> Pooling:
    """The complete settings of a pooling request, for this model and an input with this many tokens. Raises
    InvalidRequestError if the model does not support it, or a parameter is invalid."""
    check_task(info, params.task)
    if params.task == "align":
        return _resolve_alignment(params, info, prompt_len)
    modes = info.pooling_modes if params.pooling is None else (params.pooling,)
    size = info.embedding_size
    if modes and not info.pooling_modes:
        raise InvalidRequestError(
            f"pooling is {params.pooling!r}, but this model has its own head for vectors. Remove pooling.",
            param="pooling",
            code="invalid_value",
        )
    if modes != info.pooling_modes:
        if info.has_projection and len(modes) != len(info.pooling_modes):
            raise InvalidRequestError(
                f"pooling is {params.pooling!r}, but this model's embedding combines "
                f"{' and '.join(info.pooling_modes)} pooling. Remove pooling.",
                param="pooling",
                code="invalid_value",
            )
        size = info.embedding_size if info.has_projection else info.hidden_size
    if params.dimensions is not None and params.dimensions > size:
        raise InvalidRequestError(
            f"dimensions is {params.dimensions}, but this model's embeddings have only {size} dimensions.",
            param="dimensions",
            code="invalid_value",
        )
    normalize, skip = info.normalize if params.normalize is None else params.normalize, params.skip_tokens
    if params.task == "token_embed":
        normalize = info.token_vectors is not None if params.normalize is None else params.normalize
        skip = 0 if info.token_vectors is None else info.token_vectors.first
    positions, words, left_out = (tuple(places or ()) for places in (params.positions, params.words, params.left_out))
    for name, places in (("positions", positions), ("words", words), ("left_out", left_out)):
        if any(place >= prompt_len for place in places):
            raise InvalidRequestError(
                f"{name} must be below the {prompt_len} tokens of the input, got {max(places)}.", param=name
            )
        if len(places) > prompt_len:
            raise InvalidRequestError(
                f"{name} must be no more than the {prompt_len} tokens of the input, got {len(places)}.", param=name
            )
    if params.attended is not None and not (params.task == "token_embed" and _fills(info)):
        raise InvalidRequestError(
            "attended is only for token_embed with a model that pads queries with masks. Remove it.",
            param="attended",
            code="unsupported_parameter",
        )
    if params.task == "entities" and info.entities is not None:
        for name, places, most in (("positions", positions, MAX_LABELS), ("words", words, info.entities.max_words)):
            if len(places) > most:
                raise InvalidRequestError(
                    f"{name} must hold at most {most} tokens for this model, got {len(places)}. Ask in parts.",
                    param=name,
                )
    return Pooling(
        task=params.task,
        modes=modes if params.task == "embed" else (),
        normalize=normalize,
        dimensions=params.dimensions,
        use_activation=params.use_activation is not False,
        positions=positions,
        words=words,
        threshold=DEFAULT_THRESHOLD if params.threshold is None else params.threshold,
        top_k=min(params.top_k or DEFAULT_TOP_K, info.vocab_size),
        skip_tokens=min(skip, prompt_len - 1),
        left_out=left_out if params.task == "token_embed" else (),
        attended=params.attended,
    )


def _fills(info: EngineInfo) -> bool:
    """Whether one of the model's sides is filled up with tokens that none attends to."""
    sides = {} if info.token_vectors is None else info.token_vectors.sides
    return any(side.filled and not side.attended for side in sides.values())


def _resolve_alignment(params: PoolingParams, info: EngineInfo, prompt_len: int) -> Pooling:
    assert info.speech is not None  # `check_task` has checked
    if prompt_len > info.max_model_len:
        raise InvalidRequestError(
            f"the decoder's {prompt_len} tokens are too many: this model takes at most {info.max_model_len} "
            "(max_model_len).",
            param="decoder_prompt",
            code="context_length_exceeded",
        )
    if params.skip_tokens >= prompt_len:
        raise InvalidRequestError(
            f"skip_tokens is {params.skip_tokens}, but must be below the decoder's {prompt_len} tokens.",
            param="skip_tokens",
            code="invalid_value",
        )
    return Pooling(
        task="align",
        skip_tokens=params.skip_tokens,
        alignment=info.speech.alignment,
        encoder_length=params.encoder_length,
    )


def _check_places(name: str, places: Any) -> None:
    if not isinstance(places, Sequence) or isinstance(places, (str, bytes)):
        fail(name, f"{name} must be a list of integers, got {brief(places)}.")
    for place in places:
        if isinstance(place, bool) or not isinstance(place, int) or place < 0:
            fail(name, f"{name} must hold integers of at least 0, got {brief(place)}.")


def check_task(info: EngineInfo, task: Task, called: str = "") -> None:
    """Refuse a task that the model does not support. `called`: the caller's name for the task. Raises
    InvalidRequestError: gives the reason, and the supported tasks."""
    if task not in info.tasks:
        if task == "align":
            lacks = "it is not a speech model" if info.speech is None else info.speech.no_alignment
        elif info.max_encoder_len is not None and "generate" in info.tasks:
            lacks = "it is an encoder-decoder model, made to generate"
        else:
            lacks = _LACKS[called or task]
        raise InvalidRequestError(
            f"this model cannot serve {called or task}: {lacks}. It serves {', '.join(info.tasks)}.",
            param="task",
            code="unsupported_task",
        )
