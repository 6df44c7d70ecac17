"""The outputs of the engine, as callers get them.

The engine itself answers in deltas (`RequestDelta`): the tokens that became certain in one step. Texts
and cumulative answers (`RequestOutput`) are made of them by `engine.text.processor` and `engine.interface.llm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.interface.adapters import AdapterInfo
from engine.interface.vision import VisionInfo

Matrix = NDArray[np.float32]
IntMatrix = NDArray[np.int32]

FinishReason = Literal["stop", "length", "abort", "error"]
SECONDS_PER_TIMESTAMP = 0.02  # of speech models
NO_ALIGNMENT = "its generation_config.json names no alignment_heads"
Task = Literal[
    "generate", "embed", "classify", "token_classify", "answer", "entities", "fill_mask", "token_embed", "sparse_embed",
    "align",
]  # fmt: skip
PoolingMode = Literal["mean", "cls", "last", "max", "mean_sqrt_len", "weighted_mean"]
SparseTokens = Literal["vocabulary", "input"]
Activation = Literal["softmax", "sigmoid", "none"]
SignalKind = Literal["image", "audio"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of a token under the model's own distribution, before penalties,
    temperature and filters; `rank` is 1 for the most probable token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# token id -> Logprob: the chosen token first, then the most probable ones in falling order.
TokenLogprobs = dict[int, Logprob]


@dataclass(slots=True, kw_only=True)  # not frozen: making one for every row of a step would take three times as long
class ChoiceDelta:
    """New, certain tokens of one answer; immutable by convention.

    Attributes:
        index: which of the n answers.
        token_ids: tokens since the last delta (may be empty), EOS or stop id included.
        logprobs: one entry per token, if asked for.
        finish_reason: set in the answer's last delta.
        stop_reason: the stop token id that ended it (None for the model's EOS), or why it was aborted.
        cumulative_logprob: sum of the tokens' log-probabilities so far (for beams only in the last delta,
            and of the processed scores that the search added up).
        sums: `cumulative_logprob` after each token, where there are several and a stop string may end the answer at
            any of them; None for beams.
        score: in a beam's last delta: cumulative_logprob / length ** length_penalty.
    """

    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    sums: Sequence[float | None] | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class RepeatedInput:
    """The decoder's input in a model that classifies its encoder's input: one token, then the input itself up to its
    last `end`. The classifier reads the hidden state before the last `end` (BART, arXiv:1910.13461, 3.1).

    Attributes:
        start: the first token; None: the input's last one.
        end: EOS.
    """

    start: int | None
    end: int


@dataclass(frozen=True, slots=True)
class Pooled:
    """The answer to a request with `PoolingParams`: a matrix, in bytes that travel as they are.

    Attributes:
        shape: rows and columns. embed: (1, features); classify: (1, classes); token_classify: (tokens, classes);
            answer: (tokens, 2), how well an answer begins and ends there;
            fill_mask: (positions, top_k); token_embed: (tokens, features); sparse_embed: (1, tokens with a weight);
            entities: (1, pairs of a span and a label whose score is above the threshold);
            align: (tokens, 1), the position of the encoder's input from which on each token's successor is said.
        data: float32, row by row, in this machine's byte order. fill_mask: probabilities, falling.
        ids: fill_mask, sparse_embed: int32 of the same shape, the tokens. entities: the pairs, ascending, as
            (first word * max_width + words beyond the first) * labels + label.
    """

    shape: tuple[int, int]
    data: bytes
    ids: bytes | None = None

    @classmethod
    def of(cls, values: Matrix, ids: IntMatrix | None = None) -> Pooled:
        """The answer that holds these arrays."""
        rows, columns = values.shape
        data = np.ascontiguousarray(values, dtype=np.float32).tobytes()
        return cls((rows, columns), data, None if ids is None else np.ascontiguousarray(ids, dtype=np.int32).tobytes())

    def values(self) -> Matrix:
        """[rows, columns] float32; not to be written."""
        return np.frombuffer(self.data, dtype=np.float32).reshape(self.shape)

    def token_ids(self) -> IntMatrix:
        """[rows, columns] int32; not to be written."""
        return np.frombuffer(self.ids or b"", dtype=np.int32).reshape(self.shape)


class BeamMove(NamedTuple):
    """A beam goes on with a token, or ends with it.

    Attributes:
        parent: its place among the live beams of the step before.
        token_id: the token.
        score: its accumulated log-probability; of one that ends, what it is ranked by (see `ChoiceDelta.score`).
    """

    parent: int
    token_id: int
    score: float


@dataclass(frozen=True, slots=True)
class BeamMoves:
    """The decisions of one step of a beam search.

    Attributes:
        live: the beams that go on, best first; empty when the search is over.
        ended: those that ended here and are good enough to be considered.
    """

    live: Sequence[BeamMove]
    ended: Sequence[BeamMove]


@dataclass(slots=True, kw_only=True)  # not frozen: making one for every row of a step would take three times as long
class RequestDelta:
    """The news of one step for one request; immutable by convention.

    Attributes:
        request_id: the request.
        choices: answers with something new.
        finished: no further delta will come.
        prompt_logprobs: one entry per prompt token (the first is None), once, when all are known.
        num_cached_tokens: prompt tokens taken from the prefix cache when first admitted, and those of an encoder's
            input that was encoded already.
        error: why the request failed, if it did; of one with `PoolingParams`, "deadline" where that ended it.
        pooled: the whole answer to `PoolingParams`, in the last delta.
        beams: what the step decided, with `SamplingParams.stream_beams`.
        scheduled_time: `time.monotonic()` seconds, which all processes of a machine share, at which a step
            first had room for the request; in the delta of its first sample, and where it failed.
        first_token_time: when that sample was known; for beams, before its token is certain.
    """

    request_id: str
    choices: Sequence[ChoiceDelta]
    finished: bool = False
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    pooled: Pooled | None = None
    beams: BeamMoves | None = None
    scheduled_time: float | None = field(default=None, compare=False)  # the same news at another time are the same
    first_token_time: float | None = field(default=None, compare=False)


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One answer, cumulative. `token_ids` includes the EOS or stop id that ended it; `text` does not
    show special tokens unless asked to."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request's answers so far; `finished` when they are complete.

    For an encoder-decoder model, `prompt_token_ids` are the decoder's first tokens. For a request with `PoolingParams`,
    `pooled` is the answer, and `outputs` is empty. If the request ended without an answer, `error` gives the reason (as
    in `RequestDelta`).
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    encoder_token_ids: list[int] | None = None
    pooled: Pooled | None = None
    error: str | None = None

    def accumulate(self, delta: RequestDelta) -> None:
        """Take in the results of a step."""
        for news in delta.choices:
            choice = self.outputs[news.index]
            choice.token_ids.extend(news.token_ids)
            if news.logprobs is not None:
                choice.logprobs = [*(choice.logprobs or ()), *news.logprobs]
            choice.finish_reason, choice.stop_reason = news.finish_reason, news.stop_reason
            choice.cumulative_logprob, choice.score = news.cumulative_logprob, news.score
        self.finished = delta.finished
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = list(delta.prompt_logprobs)
        self.pooled, self.error = delta.pooled, delta.error

    def copy(self) -> RequestOutput:
        """The answers as they are now; later steps do not change it."""
        choices = [
            replace(
                choice,
                token_ids=list(choice.token_ids),
                logprobs=None if choice.logprobs is None else list(choice.logprobs),
            )
            for choice in self.outputs
        ]
        return replace(self, outputs=choices)


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counters since start and gauges of this moment. Pages: free + held + cached == total.

    `prompt_tokens` and `prompt_tokens_cached` count encoder inputs, too.
    `prefix_hits` counts the tokens that preempted requests found again; `prompt_tokens_cached` does not.
    `num_encoder_hits` counts how often a request found its encoder input encoded already.
    `num_steps_ahead` counts the steps that were planned before the answer of the one before them was known.
    `num_draft_tokens` counts tokens that were expected and computed, `num_accepted_draft_tokens` those that came.
    `num_kv_event_messages` counts messages about pages, `num_kv_event_drops` those that were not sent live.
    `disk_pages_written`, `disk_pages_read` count pages that moved between memory and `kv_disk`, `disk_pages_dropped`
    evicted ones that could not be written, `disk_hits` requests that got pages from there, and `disk_errors` damaged
    files and failed reads and writes; `disk_bytes` are those of all pages in the folder.
    `running_adapters`, `waiting_adapters`: the adapters of running and of waiting requests, sorted.
    `lacks_room`: the first in line waits for rows or pages, not for its part of a step.
    """

    num_running: int = 0
    num_waiting: int = 0
    lacks_room: bool = False
    pages_total: int = 0
    pages_free: int = 0
    pages_held: int = 0
    pages_cached: int = 0
    block_size: int = 0
    num_steps: int = 0
    num_steps_ahead: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_preemptions: int = 0
    num_oom_retries: int = 0
    num_page_copies: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_encoder_runs: int = 0
    num_encoder_hits: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_kv_event_messages: int = 0
    num_kv_event_drops: int = 0
    disk_pages_written: int = 0
    disk_pages_read: int = 0
    disk_pages_dropped: int = 0
    disk_hits: int = 0
    disk_errors: int = 0
    disk_bytes: int = 0
    peak_pages_held: int = 0
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CatalogueInfo:
    """Titles that answers can be limited to.

    Attributes:
        titles: how many different ones.
        longest: tokens of the longest one.
    """

    name: str
    titles: int
    longest: int

    @property
    def most_tokens(self) -> int:
        """Tokens that an answer may need: a title, the end, and one that is forced before it."""
        return self.longest + 2


@dataclass(frozen=True, slots=True)
class SignalInfo:
    """The form of an encoder's input that consists of numbers instead of token ids.

    Attributes:
        kind: what is sent.
        shape: of the array of numbers: channels, height and width; mel bins and frames.
        positions: how many positions of the encoder it becomes, which count as its tokens.
    """

    kind: SignalKind
    shape: tuple[int, ...]
    positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SideInfo:
    """The rules for reading a query, or a document, for vectors of its tokens (ColBERT, arXiv:2004.12832, 3.2).

    Attributes:
        marker: the token of the vocabulary that stands after an input's first one; None for none.
        length: inputs are cut to so many tokens, all included.
        filled: mask tokens fill inputs up to that length.
        attended: other tokens attend to those; else they have vectors, and no token attends to them.
        ignored: tokens that have no vector. A marker that the vocabulary lacks stands for the unknown token.
        punctuation: nor has the first token of each of ASCII's punctuation marks.
    """

    marker: str | None
    length: int
    filled: bool = False
    attended: bool = False
    ignored: tuple[str, ...] = ()
    punctuation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenVectorsInfo:
    """The vectors that a model makes of tokens.

    Attributes:
        size: features of one.
        first: tokens at the beginning of an input that have none.
        sides: how a "query" and a "document" are read; {}: like any text.
    """

    size: int
    first: int = 0
    sides: dict[str, SideInfo] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """The attention heads that show where in an encoder's input a decoder's tokens are said.

    Attributes:
        heads: (layer, head) pairs, at least one.
        filter_width: positions over which a median is taken of each head's weights; odd.
    """

    heads: tuple[tuple[int, int], ...]
    filter_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EntitiesInfo:
    """The rules by which a model that finds entities reads labels and texts.

    Attributes:
        label_mark, text_mark: the tokens before each label, and before the text's words.
        label_token_id: of `label_mark`.
        max_words: of a text that is read at once.
        max_width: words of an entity at most.
    """

    label_mark: str
    text_mark: str
    label_token_id: int
    max_words: int
    max_width: int


SpeechTask = Literal["transcribe", "translate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechInfo:
    """The special tokens of a speech model.

    Attributes:
        no_timestamps_id: stands before an answer without timestamps; the tokens after it are timestamps, one for each
            `SECONDS_PER_TIMESTAMP` from 0 on.
        max_initial_timestamp: the largest number of the first timestamp; None for any.
        languages: the token of each language, by its code; {} of a model for one language.
        tasks: the tokens of "transcribe" and "translate"; {} of a model that knows the first alone.
        prompt_id: stands before a text that came before; None if the model names none.
        language: the code of the one that is taken where a request names none; None: it is detected.
        task: the one that is taken where a request names none.
        defaults_are_forced: these two come from the older `forced_decoder_ids`, which count only where a request names
            neither.
        alignment: tells when each token is said; None if the model does not say by which heads.
        no_alignment: why it is None.
    """

    no_timestamps_id: int
    max_initial_timestamp: int | None = None
    languages: dict[str, int] = field(default_factory=dict)
    tasks: dict[str, int] = field(default_factory=dict)
    prompt_id: int | None = None
    language: str | None = None
    task: SpeechTask = "transcribe"
    defaults_are_forced: bool = False
    alignment: Alignment | None = None
    no_alignment: str = NO_ALIGNMENT

    @property
    def first_timestamp_id(self) -> int:
        """The token of 0 seconds."""
        return self.no_timestamps_id + 1

    @property
    def no_speech_id(self) -> int:
        """The token that is likely after the first one where nothing is said."""
        return self.no_timestamps_id - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about a loaded engine that do not change.

    Attributes:
        dtype, kv_cache_dtype: of weights and activations, and of the pages.
        full_requests: how many requests of max_model_len tokens (and the longest encoder input) the pages hold at a
            time.
        max_num_batched_tokens: most tokens of a step.
        max_encoder_len: most tokens of an encoder's input; None for all but encoder-decoder models.
        encoder_vocab_size: its ids are below this; None for all but encoder-decoder models.
        decoder_start_token_id: what its decoder begins with, None if the model does not say.
        default_forced_bos_token_id: the first token of its answers by the model's own `generation_config.json`.
        default_max_new_tokens, default_max_length: how long an answer, or prompt and answer together, may
            be by the model's own `generation_config.json`, if it says so.
        default_num_beams: beams of a search that asks for no number, by the same file; 1: it does not search.
        decoding: default values of `SamplingParams`, by name. Only numbers, words and truth values that do not depend
            on the request.
        given_up_for_temperature: names in `decoding` that do not apply to a request with a temperature.
        first_context_len: tokens that a sequence may reach with the rotary factors that the model was first trained
            with, where its context was stretched by factors that depend on length.
        tasks: what the model can serve.
        encoder_only: inputs are read whole and without pages: then block_size, num_blocks and
            full_requests are 0.
        hidden_size: features of its hidden states.
        embedding_size: features of its vectors, 0 if it gives none.
        pooling_modes: the model's own; several have their vectors laid side by side.
        normalize: its vectors have the norm 1, by its own settings.
        has_projection: its vectors are mapped by matrices after pooling.
        sparse: what the tokens of its sparse vectors are: of the whole "vocabulary", or those of the "input", where
            special tokens do not count.
        token_vectors: those made to be compared token by token; None: it has only hidden states.
        entities: how it reads labels and texts, where it finds entities; None of other models.
        labels: names of the classes that its head tells apart.
        activation: the function that makes probabilities of the head's numbers.
        repeats: how its decoder reads the input that its encoder reads, for encoder-decoder models that classify.
        sides: the number of values of each side of its tokens that it reads (`engine.interface.token_sides`).
        second_after: where nothing is said of an input's segments, its tokens after the first one of this id are of the
            second, and those after its first token where there is no such; None: all are of the first.
        lower_case: texts are to be lower-cased before they are tokenised.
        prompts, default_prompt: texts to put in front of inputs by their names, and the name of the one that is used
            unless another is asked for.
        include_prompt: the tokens of such a prompt count in the vector.
        quantization: what matrices were made into, "int8", "int8-fast", "int4" or "stored"; None: they have the dtype.
        catalogues: of titles that answers can be limited to.
        filler: the token that fills texts up to max_model_len, for a model that was trained on texts of one length;
            None: texts are as long as they are.
        speech: the special tokens of a model that turns speech into text; None of others.
        signal: what its encoder, or one of its two, reads that is no token ids; None: it reads those alone. A model
            without a vocabulary (`vocab_size` is 0) reads nothing else.
        adapters: those that were loaded at the start.
        max_loras, max_lora_rank: most adapters that are loaded at the same time, and their largest rank.
        model_file: the GGUF file that was loaded, for which the folder `model_path` stands; None: it is the model's.
        vision: the images that it reads among its tokens; None: it reads none.
    """

    model: str
    model_path: str
    dtype: str
    kv_cache_dtype: str
    device: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    full_requests: float
    max_num_seqs: int
    max_num_beams: int
    max_num_batched_tokens: int = 2048
    max_encoder_len: int | None = None
    encoder_vocab_size: int | None = None
    decoder_start_token_id: int | None = None
    default_forced_bos_token_id: int | None = None
    default_max_new_tokens: int | None = None
    default_max_length: int | None = None
    default_num_beams: int = 1
    decoding: dict[str, bool | int | float | str] = field(default_factory=dict)
    given_up_for_temperature: tuple[str, ...] = ()
    first_context_len: int | None = None
    tasks: tuple[Task, ...] = ("generate",)
    encoder_only: bool = False
    hidden_size: int = 0
    embedding_size: int = 0
    pooling_modes: tuple[PoolingMode, ...] = ()
    normalize: bool = True
    has_projection: bool = False
    sparse: SparseTokens | None = None
    token_vectors: TokenVectorsInfo | None = None
    entities: EntitiesInfo | None = None
    labels: tuple[str, ...] = ()
    activation: Activation = "none"
    repeats: RepeatedInput | None = None
    sides: dict[str, int] = field(default_factory=dict)
    second_after: int | None = None
    lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    include_prompt: bool = True
    quantization: str | None = None
    catalogues: tuple[CatalogueInfo, ...] = ()
    filler: int | None = None
    speech: SpeechInfo | None = None
    signal: SignalInfo | None = None
    adapters: tuple[AdapterInfo, ...] = ()
    max_loras: int = 0
    max_lora_rank: int = 0
    model_file: str | None = None
    vision: VisionInfo | None = None

    @property
    def format(self) -> str:
        """The format of weights and activations, such as "bfloat16" or "bfloat16 with int8 weights"."""
        if self.quantization is None:
            return self.dtype
        return f"{self.dtype} with {'packed' if self.quantization == 'stored' else self.quantization} weights"
