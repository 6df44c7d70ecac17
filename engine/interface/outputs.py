"""The outputs of the engine for callers.

The engine itself returns deltas (`RequestDelta`): the tokens that became certain in one step. `engine.text.processor`
and `engine.offline.llm` turn them into texts and cumulative answers (`RequestOutput`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.interface.adapters import AdapterInfo
from engine.interface.vision import VisionInfo

Matrix = NDArray[np.float32]
IntMatrix = NDArray[np.int32]

FinishReason = Literal["stop", "length", "abort", "error"]
SECONDS_PER_TIMESTAMP = 0.02  # for speech models
NO_ALIGNMENT = "its generation_config.json does not name alignment_heads"
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


# token id -> Logprob: the chosen token first, then the most probable ones in descending order.
TokenLogprobs = dict[int, Logprob]


@dataclass(
    slots=True, kw_only=True
)  # not frozen: frozen ones take three times as long to make, for every row of a step
class ChoiceDelta:
    """New, certain tokens of one answer; do not modify it.

    Attributes:
        index: the index among the n answers.
        token_ids: tokens since the last delta (may be empty), including the EOS or stop id.
        logprobs: one entry per token, if requested.
        finish_reason: set in the answer's last delta.
        stop_reason: the stop token id that ended it (None for the model's EOS), or the reason for an abort.
        cumulative_logprob: sum of the tokens' log-probabilities so far (for beams only in the last delta, as the sum of
            the processed scores of the search).
        sums: `cumulative_logprob` after each token, if there are several and a stop string may end the answer at any of
            them; None for beams.
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
    """The decoder's input in a model that classifies its encoder's input: one token, then the input up to its last
    `end`. The classifier reads the hidden state before the last `end` (BART, arXiv:1910.13461, 3.1). `start`: the first
    token; None for the input's last one."""

    start: int | None
    end: int


@dataclass(frozen=True, slots=True)
class Pooled:
    """The answer to a request with `PoolingParams`: a matrix, as bytes that can be sent unchanged.

    Attributes:
        shape: rows and columns. embed: (1, features); classify: (1, classes); token_classify: (tokens, classes);
            answer: (tokens, 2), the scores that an answer begins and ends there;
            fill_mask: (positions, top_k); token_embed: (tokens, features); sparse_embed: (1, tokens with a weight);
            entities: (1, pairs of a span and a label with a score above the threshold);
            align: (tokens, 1), the encoder position from which each token's successor is spoken.
        data: float32, row by row, in this machine's byte order. fill_mask: probabilities in descending order.
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
        """[rows, columns] float32; read-only."""
        return np.frombuffer(self.data, dtype=np.float32).reshape(self.shape)

    def token_ids(self) -> IntMatrix:
        """[rows, columns] int32; read-only."""
        return np.frombuffer(self.ids or b"", dtype=np.int32).reshape(self.shape)


class BeamMove(NamedTuple):
    """A beam continues with a token or ends with it."""

    parent: int  # its index among the live beams of the previous step
    token_id: int
    # its accumulated log-probability; for a beam that ends, the score that ranks it (see `ChoiceDelta.score`)
    score: float


@dataclass(frozen=True, slots=True)
class BeamMoves:
    """The decisions of one step of a beam search.

    Attributes:
        live: the beams that continue, best first; empty when the search is over.
        ended: beams that ended here and are candidates for the answer.
    """

    live: Sequence[BeamMove]
    ended: Sequence[BeamMove]


@dataclass(
    slots=True, kw_only=True
)  # not frozen: frozen ones take three times as long to make, for every row of a step
class RequestDelta:
    """The results of one step for one request; do not modify it.

    Attributes:
        request_id: the request.
        choices: answers with new results.
        finished: whether this is the last delta.
        prompt_logprobs: one entry per prompt token (the first is None), once, when all are known.
        num_cached_tokens: prompt tokens taken from the prefix cache at first admission, and tokens of an encoder's
            input that was already encoded.
        error: the reason if the request failed; for `PoolingParams`, "deadline" if that ended it.
        pooled: the whole answer to `PoolingParams`, in the last delta.
        beams: the decisions of the step, with `SamplingParams.stream_beams`.
        scheduled_time: when a step first had room for the request, in `time.monotonic()` seconds, which all processes
            of a machine share; in the delta of its first sample, and on failure.
        first_token_time: when that sample was known; for beams, before its token is certain.
        num_draft_tokens, num_accepted_draft_tokens: numbers of tokens that the step drafted for the request, and of
            those that were accepted.
    """

    request_id: str
    choices: Sequence[ChoiceDelta]
    finished: bool = False
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    pooled: Pooled | None = None
    beams: BeamMoves | None = None
    scheduled_time: float | None = field(default=None, compare=False)  # equal results at different times are equal
    first_token_time: float | None = field(default=None, compare=False)
    num_draft_tokens: int = field(default=0, compare=False)  # equal results with different drafts are equal, too
    num_accepted_draft_tokens: int = field(default=0, compare=False)


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One answer, cumulative. `token_ids` includes the EOS or stop id that ended it; `text` has no special tokens
    unless requested."""

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
        """Add the results of a step."""
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
        """A copy of the current answers, which later steps do not change."""
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
    """Counters since start, and current gauges. Pages: free + held + cached == total.

    `prompt_tokens` and `prompt_tokens_cached` include encoder inputs. `prefix_hits` includes tokens that preempted
    requests found again; `prompt_tokens_cached` does not. `num_encoder_hits` counts how often a request found its
    encoder input already encoded. `num_steps_ahead` counts steps that were planned before the previous step's result
    was known. `num_draft_tokens` counts tokens that were drafted and computed, `num_accepted_draft_tokens` the drafts
    that were right; `drafted_at`, `accepted_at` count them by their position in the drafts of a sequence.
    `num_kv_event_messages` counts messages about pages, `num_kv_event_drops` messages that were not sent live.
    `disk_pages_written`, `disk_pages_read` count pages that moved between memory and `kv_disk`, `disk_pages_dropped`
    evicted ones that could not be written, `disk_hits` requests that got pages from there, and `disk_errors` damaged
    files and failed reads and writes; `disk_bytes` are those of all pages in the folder.
    `running_adapters`, `waiting_adapters`: the adapters of running and of waiting requests, sorted.
    `lacks_room`: whether the first waiting request waits for rows or pages, not for its part of a step.
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
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
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
    """Titles to which answers can be limited. `titles`: number of different titles."""

    name: str
    titles: int
    longest: int

    @property
    def most_tokens(self) -> int:
        """Maximum tokens of an answer: a title, the end, and a forced token before it."""
        return self.longest + 2


@dataclass(frozen=True, slots=True)
class SignalInfo:
    """The form of an encoder's input that is numbers instead of token ids."""

    kind: SignalKind
    shape: tuple[int, ...]  # shape of the array: channels, height and width; or mel bins and frames
    positions: int  # number of encoder positions that it becomes, which count as its tokens
    texts: bool = False  # whether the encoder reads a text's tokens after it


@dataclass(frozen=True, slots=True, kw_only=True)
class SideInfo:
    """The rules for reading a query or a document for token vectors (ColBERT, arXiv:2004.12832, 3.2)."""

    marker: str | None  # the vocabulary token after an input's first token; None for none
    length: int  # the number of tokens that inputs are cut to, including special ones
    filled: bool = False  # whether mask tokens fill inputs up to that length
    # whether other tokens attend to the masks; otherwise masks have vectors, but no token attends to them
    attended: bool = False
    # tokens without a vector. A marker that the vocabulary lacks becomes the unknown token.
    ignored: tuple[str, ...] = ()
    punctuation: bool = False  # whether the first token of each ASCII punctuation mark also has no vector


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenVectorsInfo:
    """The token vectors of a model."""

    size: int  # features per vector
    first: int = 0  # tokens at the beginning of an input without a vector
    # the rules for a "query" and a "document"; {} if they are read like any text
    sides: dict[str, SideInfo] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """The attention heads that show where in an encoder's input a decoder's tokens are spoken."""

    heads: tuple[tuple[int, int], ...]  # (layer, head) pairs, at least one
    filter_width: int  # positions of the median filter over each head's weights; odd


@dataclass(frozen=True, slots=True, kw_only=True)
class EntitiesInfo:
    """The rules for reading labels and texts in a model that finds entities."""

    # label_mark, text_mark: the tokens before each label, and before the text's words
    label_mark: str
    text_mark: str
    label_token_id: int  # the id of `label_mark`
    max_words: int  # maximum words of a text that is read at once
    max_width: int  # maximum words of an entity


SpeechTask = Literal["transcribe", "translate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechInfo:
    """The special tokens of a speech model."""

    # comes before an answer without timestamps; the token ids above it are timestamps, one for each
    # `SECONDS_PER_TIMESTAMP` from 0 on
    no_timestamps_id: int
    max_initial_timestamp: int | None = None  # the largest index of the first timestamp; None for no limit
    languages: dict[str, int] = field(default_factory=dict)
    # the tokens of "transcribe" and "translate"; {} for a model that only transcribes
    tasks: dict[str, int] = field(default_factory=dict)
    prompt_id: int | None = None  # the token before a preceding text; None if the model has none
    language: str | None = None  # the code of the default language; None: it is detected
    task: SpeechTask = "transcribe"
    # whether these two defaults come from the older `forced_decoder_ids`, which apply only if a request sets neither
    defaults_are_forced: bool = False
    alignment: Alignment | None = None  # the heads for token times; None if the model lists none
    no_alignment: str = NO_ALIGNMENT  # the reason if it is None

    @property
    def first_timestamp_id(self) -> int:
        """The token for 0 seconds."""
        return self.no_timestamps_id + 1

    @property
    def no_speech_id(self) -> int:
        """The token that is likely after the first one if the sound contains no speech."""
        return self.no_timestamps_id - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """The tasks that a model supports, and what they need (`EngineInfo` describes the fields)."""

    tasks: tuple[Task, ...] = ("generate",)
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
    filler: int | None = None

    def facts(self) -> dict[str, Any]:
        """The fields by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo(Abilities):
    """Constant facts about a loaded engine.

    Attributes:
        dtype, kv_cache_dtype: the formats of weights and activations, and of the pages.
        full_requests: the number of requests of max_model_len tokens (and the longest encoder input) that the pages
            hold at a time.
        max_num_batched_tokens: maximum tokens of a step.
        max_encoder_len: maximum tokens of an encoder's input; None except for encoder-decoder models.
        encoder_vocab_size: the encoder's token ids are below this; None except for encoder-decoder models.
        decoder_start_token_id: the decoder's first token; None if the model sets none.
        default_forced_bos_token_id: the first token of answers, from the model's `generation_config.json`.
        default_max_new_tokens, default_max_length: maximum length of an answer, or of prompt and answer together, from
            the model's `generation_config.json`, if set.
        default_num_beams: beams of a request that sets no number, from the same file; 1: no beam search.
        decoding: default values of `SamplingParams`, by name. It contains only numbers, words and booleans that do not
            depend on the request.
        given_up_for_temperature: names in `decoding` that do not apply to a request with a temperature.
        first_context_len: tokens that a sequence may have with the original rotary factors, if the context was
            stretched by factors that depend on length.
        tasks: the tasks that the model supports.
        encoder_only: whether inputs are read whole and without pages; block_size, num_blocks and full_requests are then
            0.
        hidden_size: features of the hidden states.
        embedding_size: features of its vectors, 0 if it makes none.
        pooling_modes: the model's own poolings; the vectors of several are concatenated.
        normalize: whether its vectors have the norm 1, by its own settings.
        has_projection: whether matrices map its vectors after pooling.
        sparse: the tokens of its sparse vectors: the whole "vocabulary", or those of the "input" without special
            tokens.
        token_vectors: vectors made to be compared token by token; None: it has only hidden states.
        entities: the rules for reading labels and texts, if it finds entities; None for other models.
        labels: names of the classes of its head.
        activation: the function that turns the head's numbers into probabilities.
        repeats: how the decoder reads the encoder's input, for encoder-decoder models that classify.
        sides: the number of values of each side of its tokens that it reads (`engine.interface.token_sides`).
        second_after: default segments: tokens after the first one with this id are in the second segment (or, without
            such a token, all after the first token); None: all are in the first.
        lower_case: whether texts are lower-cased before they are tokenised.
        prompts, default_prompt: texts to put before inputs, by name, and the name of the default.
        include_prompt: whether the tokens of such a prompt count in the vector.
        quantization: format of the matrices, "int8", "int8-fast", "int4" or "stored"; None: they have the dtype.
        catalogues: titles to which answers can be limited.
        filler: the token that pads texts to max_model_len, for a model trained on texts of one length;
            None: texts are not padded.
        speech: the special tokens of a speech model; None for others.
        signal: the input of its encoder (or of one of two) that is not token ids; None: it takes only token ids. A
            model without a vocabulary (`vocab_size` is 0) takes nothing else.
        adapters: the adapters loaded at start.
        max_loras, max_lora_rank: maximum number of loaded adapters, and their maximum rank.
        model_file: the loaded GGUF file that the folder `model_path` represents; None: the folder is the model's own.
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
    encoder_only: bool = False
    hidden_size: int = 0
    quantization: str | None = None
    catalogues: tuple[CatalogueInfo, ...] = ()
    speech: SpeechInfo | None = None
    signal: SignalInfo | None = None
    adapters: tuple[AdapterInfo, ...] = ()
    max_loras: int = 0
    max_lora_rank: int = 0
    model_file: str | None = None
    vision: VisionInfo | None = None

    @property
    def writes_of_images(self) -> bool:
        """Whether it is an encoder-decoder model whose encoder reads an image."""
        return self.max_encoder_len is not None and self.signal is not None and self.signal.kind == "image"

    @property
    def format(self) -> str:
        """The format of weights and activations, such as "bfloat16" or "bfloat16 with int8 weights"."""
        if self.quantization is None:
            return self.dtype
        return f"{self.dtype} with {'packed' if self.quantization == 'stored' else self.quantization} weights"
