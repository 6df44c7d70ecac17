"""One step's work order and its answer: flat numpy arrays, built anew for each step.

T tokens run in R rows (a row is one sequence's chunk); S of the T tokens are sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.interface.pooling import Pooling
from engine.interface.sampling_table import NO_EDITS, NO_MASKS, EditList, Masks, Table, new_version
from engine.interface.token_sides import Sides

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]
UInt8 = NDArray[np.uint8]
_NO_ROWS: Int32 = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """The instructions that turn the logits of the S sampled tokens into candidates (see
    `engine.interface.sampling_table`)."""

    rows: Int32  # [S] indices into the flat tokens
    table: Table  # [S] `TABLE`
    # [S, max draws] numbers in [0, 1), one per draw: the same that a device itself makes from the table's seeds,
    # choices and positions (`engine.scheduling.philox`)
    uniforms: Float64
    # [E] `EDIT`, in the order of the rows, and within a row in that of their kinds
    edits: EditList = field(default_factory=lambda: NO_EDITS)
    masked: Int32 = field(default_factory=lambda: _NO_ROWS)  # [M] rows that have a mask, ascending
    # [M, words] the allowed tokens of each, a bit each (`mask_words`); the others are impossible, as if they were
    # banned
    masks: Masks = field(default_factory=lambda: NO_MASKS)
    # [M] `outweighed_from` of each mask's constraint (`engine.interface.constraints.Weighing`); -1 for a mask without
    # weighing. If it is empty, no mask has weighing.
    outweighed: Int32 = field(default_factory=lambda: _NO_ROWS)
    # [S, W] tokens whose log-probabilities are wanted, whatever is sampled (`logprob_token_ids`); a row with fewer ends
    # with zeros. None if there are none.
    watched: Int32 | None = None
    # [N + 1] index of the first token of each sampled row. A row with drafts has several. None if each row has one.
    spans: Int32 | None = None
    # [S] the token that was drafted for this position; -1 for the last one of a row. None if `spans` is None.
    drafts: Int32 | None = None
    # a batch of the same version as the one before it has the same table, except that all rows are one token further
    version: int = field(default_factory=new_version)
    # a batch of the same version of edits as the one before it has the same edits
    edits_version: int = field(default_factory=new_version)
    fill: Callable[[], Masks] | None = None  # returns `masks`, if they are not there yet (`filled`); None if they are

    def filled(self) -> SamplingBatch:
        """The same batch with its masks. Call it once, after the forward pass has begun: on a device, masks are made
        while it computes."""
        return self if self.fill is None else replace(self, masks=self.fill(), fill=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobRows:
    """P prompt positions whose next token's log-probability is wanted."""

    rows: Int32  # [P] indices into the flat tokens
    targets: Int32  # [P] the prompt token that follows
    num_logprobs: Int32  # [P] how many most probable tokens to report


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderBatch:
    """E tokens of N whole encoder inputs, laid end to end."""

    token_ids: Int32  # [E]
    starts: Int32  # [N + 1] first flat token of each input
    slots: Int32  # [E] where each token's K and V for the decoder's layers are stored
    # what is read of each input instead of its tokens, which are then zeros; () if all are tokens. A model's inputs are
    # all of one kind.
    signals: tuple[Float32, ...] = ()
    # facts about the tokens beside their ids (`engine.interface.token_sides`)
    sides: Sides = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossRows:
    """The encoder inputs that a plan's R rows read."""

    tables: Int32  # [R, max blocks] pages of each row's encoder output, as `StepPlan.block_tables`
    lens: Int32  # [R] tokens of those inputs
    # [R] consecutive rows of one request have the same number: they read the same, so that it can be read once for all
    # of them
    owners: Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRows:
    """State slots of a plan's R rows (`engine.scheduling.state_slots`). Slot 0 is zeros, and never written."""

    sources: Int32  # [R] the state before each row's first token
    targets: Int32  # [R] where the state after its last token is stored
    snapshots: Int32  # [R] where the state after its first `afters` tokens is also stored; 0 for nowhere
    afters: Int32  # [R]


@dataclass(frozen=True, slots=True, kw_only=True)
class Searches:
    """G beam searches that continue before the host knows the answer to the step launched before: N rows of the plan,
    one per beam, in the order of the searches.

    The executor chooses from that step's candidates (`engine.execution.beams_ahead`), as `search.rank` and
    `BeamSearch.choose` do later: of all beams' candidates, those that do not end a beam continue, best first, the best
    one in the search's first row. Each is the token of its row, in the position that `StepPlan.sources` names. The row
    of block tables becomes that of the continued beam, except for the page that is written. If `fresh`, that page is
    the row's own from `pages`, which is empty. Else the first row that continues a beam keeps the beam's page, and any
    further row has its own page from `pages`, to which the beam's is copied before anything is written. If fewer
    candidates are left than rows, or scores are not numbers, the search's rows have no effect; they write nowhere else.
    """

    rows: Int32  # [G] the plan's row of each search's first beam; the others follow
    # [G] the number of the first beam's token among the S sampled ones of the step launched before; the others follow
    places: Int32
    widths: Int32  # [G] number of beams
    candidates: Int32  # [G] how many columns of each beam's candidates count
    columns: Int32  # [G] the column of the block tables with the page that is written
    fresh: Bool  # [G] whether that page is a new one
    scores: Float32  # [N] accumulated scores of the beams before that step
    pages: Int32  # [N] the page set aside for each row; 0 if it needs none in any case
    stop_ids: Int32  # [M] the tokens that end beams, of all searches
    stops: Int32  # [G + 1] index of each search's first one


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRow:
    """A row whose hidden states are wanted."""

    row: int
    pooling: Pooling
    start: int  # number of the input's tokens before the row's first
    complete: bool  # whether the row ends the input
    # [modes, features] `PooledRow.values` after the input's earlier tokens, None if there are none
    before: Float64 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRows:
    """Vectors of an image that a step's tokens have."""

    key: bytes
    pixels: UInt8  # uint8 [crops, channels, height, width]
    size: tuple[int, int]  # height and width of the image as it was sent
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The work of one forward pass."""

    # token_ids, positions: [T]
    token_ids: Int32
    positions: Int32
    slots: Int32  # [T] where each token's K and V are stored: block * block_size + offset
    query_start: Int32  # [R + 1] first flat token of each row
    # [R] tokens of the sequence in the cache after this step; for an encoder's input, the number of its first tokens
    # that are attended to
    context_lens: Int32
    block_tables: Int32  # [R, max blocks] page numbers; 0 if a row has fewer, and if none of its queries sees the page
    # [C, 2] pages to copy (source, destination) before anything is written; all sources are read before any destination
    # is written
    copies: Int32
    sampling: SamplingBatch | None  # the sampled tokens, or None if no row is complete
    prompt_logprobs: PromptLogprobRows | None  # prompt positions to score, or None
    encoder: EncoderBatch | None = None  # inputs to encode before anything else is computed, or None
    cross: CrossRows | None = None  # the encoder inputs that the rows read; None if no row has one
    # the rows' state slots; None if they have none: then states begin as zeros, and are not kept
    states: StateRows | None = None
    pooling: tuple[PoolingRow, ...] = ()  # the rows whose hidden states are wanted, in the order of the rows
    # whether the rows are whole inputs of an encoder without pages: `slots` and `block_tables` are then empty
    unchunked: bool = False
    # facts about the tokens beside their ids (`engine.interface.token_sides`)
    sides: Sides = field(default_factory=dict)
    # what is read of each row instead of its tokens, which are then zeros; None for a row of tokens. () if all rows are
    # tokens.
    signals: tuple[Float32 | None, ...] = ()
    # [T] for a token that is not known yet (0 in `token_ids`), its number among the S sampled tokens of the step
    # launched before this one (the first column); -1 for all others. None if all are known.
    sources: Int32 | None = None
    # beam searches for which not even the beams of the rows are known: their `slots` and `block_tables` are those of
    # the beams before; None if there are none
    searches: Searches | None = None
    # the images whose vectors tokens have. A side of the tokens counts these vectors.
    images: tuple[ImageRows, ...] = ()
    # [R] as `AttentionMetadata.two_way`
    two_way: tuple[int, ...] | None = None
    image_work: float = 0.0  # about how much work it is to make the vectors that are not known, in tokens
    # a plan of the same version as the previous step's has the same rows, each one token further: the same `cross`, and
    # a `sampling` of the same version. Every other plan has a separate version.
    version: int = field(default_factory=new_version)

    def of_rows(self, rows: Sequence[int]) -> StepPlan:
        """Only some rows of an unchunked plan, in order."""
        chosen = list(rows)
        counts = np.diff(self.query_start)
        places = np.concatenate([np.arange(*self.query_start[row : row + 2]) for row in chosen])
        numbers = {row: number for number, row in enumerate(chosen)}
        return replace(
            self,
            token_ids=self.token_ids[places],
            positions=self.positions[places],
            query_start=np.cumsum([0, *counts[chosen]], dtype=np.int32),
            context_lens=self.context_lens[chosen],
            block_tables=self.block_tables[chosen],
            pooling=tuple(replace(wanted, row=numbers[wanted.row]) for wanted in self.pooling if wanted.row in numbers),
            sides={name: values[places] for name, values in self.sides.items()},
            signals=tuple(self.signals[row] for row in chosen) if self.signals else (),
            version=new_version(),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.context_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Log-probabilities of N tokens under the model's own distribution."""

    logprobs: Float32  # [N] of the tokens
    ranks: Int32  # [N], 1 for the most probable
    # top_ids, top_logprobs: [N, L] the most probable tokens, L the largest number any row asked for
    top_ids: Int32
    top_logprobs: Float32


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledRow:
    """The result for a `PoolingRow`."""

    # for a row that is not complete, the value for the next one's `before`; else the answer, as described in
    # `engine.interface.outputs.Pooled`
    values: NDArray[np.floating[Any]]
    ids: Int32 | None = None  # the tokens, for fill_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Candidates for each of the S sampled tokens; unused columns are undefined."""

    # [S, C] drawn tokens (first num_draws columns) or a beam row's best ones (first beam_width columns, best first)
    tokens: Int32
    scores: Float32  # [S, C] for beam rows: processed log-probability of each candidate; -inf if impossible
    logprobs: Float32  # [S, C] under the model's own distribution
    ranks: Int32  # [S, C] rank under the model's own distribution, 0 if not requested
    # top_ids, top_logprobs: [S, L] most probable tokens, if requested
    top_ids: Int32
    top_logprobs: Float32
    # [S, W] log-probabilities of the batch's `watched` under the model's own distribution
    watched: Float32 | None = None
    # [N] how many of each row's sampled tokens follow its sequence: those up to and including the first that differs
    # from its draft. None if each row has one.
    accepted: Int32 | None = None
    prompt_logprobs: TokenScores | None = None  # for the plan's prompt positions, in their order
    pooled: tuple[PooledRow, ...] = ()  # for the plan's `pooling`, in their order

    @classmethod
    def empty(cls) -> StepResult:
        """The answer to a plan that samples nothing."""
        ints, floats = np.zeros((0, 0), dtype=np.int32), np.zeros((0, 0), dtype=np.float32)
        return cls(tokens=ints, scores=floats, logprobs=floats, ranks=ints, top_ids=ints, top_logprobs=floats)

    def accepting(self, batch: SamplingBatch) -> StepResult:
        """The same result, with `accepted` computed by comparison with the drafts. A token whose log-probability is not
        a number is never accepted as a further token: it is sampled again as the first, and fails then."""
        if batch.spans is None or batch.drafts is None:
            return self
        goes_on = (self.tokens[:, 0] == batch.drafts) & ~np.isnan(np.append(self.logprobs[1:, 0], 0.0))
        # The first position of each row at which it does not continue: a row's last one never does.
        ends = np.flatnonzero(~goes_on)
        firsts = batch.spans[:-1]
        return replace(self, accepted=(ends[np.searchsorted(ends, firsts)] - firsts + 1).astype(np.int32))


class LateResult(Protocol):
    """A result that is still on its way from the device."""

    @property
    def ready(self) -> bool:
        """Whether `result` returns without waiting."""

    def result(self) -> StepResult:
        """Wait for the result and return it. Raises the step's errors."""
