"""The scheduler's state of a request while it is alive: its sequences and their progress.

Only the `Scheduler` changes these objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum

import numpy as np

from engine.interface.constraints import Constraint, Forcing, Lifting
from engine.interface.outputs import TokenLogprobs
from engine.interface.request import Decoding, Request
from engine.interface.sampling_table import REQUESTED, neutral_rows
from engine.interface.token_sides import Sides, hashed
from engine.scheduling.block_pool import PageHash, PageHasher
from engine.scheduling.encoder_input import EncoderInput
from engine.scheduling.plan import Float32, Float64, Int32
from engine.scheduling.search import BeamSearch, Hypothesis

_EMPTY = np.zeros(0, dtype=np.int32)


class IntBuffer:
    """A growing int32 array: O(1) append, and slices that need no conversion. `size`: the number of its values; do not
    set it."""

    __slots__ = ("_data", "size")

    def __init__(self, values: Iterable[int] = ()):
        given = list(values)
        self._data = np.array(given, dtype=np.int32) if given else _EMPTY
        self.size = len(given)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    def __getitem__(self, index: int) -> int:
        if not -self.size <= index < self.size:
            raise IndexError(f"index {index} is outside the buffer's {self.size} values")
        return self._data.item(index if index >= 0 else self.size + index)

    def __setitem__(self, index: int, value: int) -> None:
        self._data[: self.size][index] = value

    def extend(self, values: Iterable[int]) -> None:
        new = list(values)
        end = self.size + len(new)
        if end > len(self._data):
            self._data = self._grown(max(end, 2 * self.size))
        self._data[self.size : end] = new
        self.size = end

    def append(self, value: int) -> None:
        if self.size == len(self._data):
            self._data = self._grown(2 * self.size)
        self._data[self.size] = value
        self.size += 1

    def view(self, start: int = 0, end: int | None = None) -> Int32:
        """A slice that shares memory; valid until the next append."""
        return self._data[start : self.size if end is None else end]

    def tolist(self) -> list[int]:
        return self._data[: self.size].tolist()  # type: ignore[no-any-return]

    def assign(self, other: IntBuffer, start: int = 0) -> None:
        """Copy the values of another buffer, with room for more; those before `start` are equal already."""
        if other.size > len(self._data):
            self._data = self._grown(other.size)
        self._data[start : other.size] = other._data[start : other.size]
        self.size = other.size

    def shorten(self, size: int) -> None:
        """Keep only the first values."""
        self.size = min(self.size, size)

    def _grown(self, size: int) -> Int32:
        grown = np.empty(size + 16, dtype=np.int32)
        grown[: self.size] = self._data[: self.size]
        return grown


class Sequence:
    """One line of tokens with its pages.

    Attributes:
        num_computed: number of tokens whose K and V are in the pages.
        num_in_flight: number of tokens after those that steps in flight compute.
        num_pending: number of tokens that those steps sample: they follow `tokens`, and are not known yet; with drafts,
            the maximum.
        num_releases: how often it released its pages or its rows in flight. Results of rows that were planned before
            that are dropped.
        num_writable: number of tokens up to which its pages exist and are referenced once, so that they may be written.
            0 if it is not known yet.
        source: the page to copy to the one that it writes next, before it does; 0 for none.
    """

    __slots__ = (
        "constraint",
        "drafting",
        "hashes",
        "index",
        "last_snapshot",
        "logprobs",
        "num_computed",
        "num_in_flight",
        "num_pending",
        "num_prompt",
        "num_published",
        "num_releases",
        "num_writable",
        "repeats",
        "score",
        "snapshots",
        "source",
        "states",
        "table",
        "tokens",
        "uniforms",
    )

    def __init__(self, index: int, prompt: Iterable[int], *, with_logprobs: bool):
        self.index = index  # which of the request's answers it is (sampling); for beams just a number
        self.tokens = prompt if isinstance(prompt, IntBuffer) else IntBuffer(prompt)  # prompt and output
        self.num_prompt = len(self.tokens)  # number of prompt tokens
        self.num_computed = self.num_in_flight = self.num_pending = self.num_releases = 0
        self.table = IntBuffer()  # pages, in order; 0 for those outside every layer's window
        self.num_writable = self.source = 0
        # slots of the states after `num_computed` tokens and after those of each row in flight; 0 is the state before
        # the first token
        self.states: list[int] = [0]
        self.snapshots: list[int] = []  # slots that rows in flight write besides
        self.last_snapshot: PageHash | None = None  # the page at whose end the last state of its answer was published
        self.hashes: list[PageHash] = []  # hashes of the full pages at the beginning, as far as they were needed
        self.num_published = 0  # number of full pages already offered to the prefix cache
        self.score = 0.0  # accumulated log-probability of the output
        # one entry per output token, if asked for (beams only: other answers send them at once)
        self.logprobs: list[TokenLogprobs] | None = [] if with_logprobs else None
        # random numbers for the next output tokens, by position, as far as they were made
        self.uniforms: dict[int, float] = {}
        self.constraint: Constraint | None = None  # the constraint on its output so far, None if all tokens are allowed
        self.drafting: object | None = None  # the drafter's knowledge of the sequence; None until it has been asked
        # for each position, how many tokens up to it equal the tokens' end at that length; replaced rather than changed
        # (`engine.scheduling.repetition`)
        self.repeats: Int32 = _EMPTY

    @property
    def num_tokens(self) -> int:
        return self.tokens.size

    @property
    def num_output(self) -> int:
        return self.tokens.size - self.num_prompt

    @property
    def num_scheduled(self) -> int:
        """Number of tokens that are computed, or will be by the steps in flight."""
        return self.num_computed + self.num_in_flight

    @property
    def mask(self) -> Constraint | None:
        """The constraint on the next tokens; None if any is allowed."""
        constraint = self.constraint
        if constraint is None:  # most have none, and `isinstance` takes microseconds for a protocol
            return None
        return None if isinstance(constraint, Lifting) and constraint.is_free else constraint

    def output(self) -> tuple[int, ...]:
        """The tokens generated so far."""
        return tuple(self.tokens.view(self.num_prompt).tolist())

    def extend_hashes(
        self, hasher: PageHasher, root: PageHash, block_size: int, num_pages: int, sides: Sides | None = None
    ) -> list[PageHash]:
        """Compute hashes of the first num_pages pages, which the known tokens must fill; `sides` are the tokens'
        sides."""
        while len(self.hashes) < num_pages:
            start = len(self.hashes) * block_size
            parent = self.hashes[-1] if self.hashes else root
            content = self.tokens.view(start, start + block_size)
            if sides and (more := hashed(sides, start, block_size)):
                content = np.concatenate((content, *more))
            self.hashes.append(hasher.extend(parent, content))
        return self.hashes[:num_pages]

    def follow(self, parent: Sequence) -> None:
        """Become a copy of another sequence of the group. The caller takes care of the pages."""
        self.tokens.assign(parent.tokens, self.num_prompt)
        self.num_prompt = parent.num_prompt
        self.num_computed = parent.num_computed
        self.hashes = list(parent.hashes)
        self.num_published = parent.num_published
        self.score = parent.score
        self.logprobs = None if parent.logprobs is None else list(parent.logprobs)
        self.constraint = None if parent.constraint is None else parent.constraint.fork()
        self.drafting = None
        self.repeats = parent.repeats

    def append(self, decoding: Decoding, token: int) -> None:
        """Continue with a token. The sequence's constraint advances by the token, unless the token is forced or the
        model's EOS."""
        if self.constraint is not None:
            if token not in decoding.eos_ids:
                self._tell(self.constraint, decoding, token)
            elif isinstance(self.constraint, Lifting):
                self.constraint.pass_by(token)
        self.tokens.append(token)

    def _tell(self, constraint: Constraint, decoding: Decoding, token: int) -> None:
        if not decoding.forced_after(self.num_tokens, self.num_output):
            constraint.accept(token)

    def void(self) -> None:
        """Drop the results of its rows in flight."""
        self.num_in_flight = self.num_pending = 0
        self.num_releases += 1

    def gone_on(self, decoding: Decoding, token: int) -> Sequence:
        """A copy without pages that has continued with a token."""
        copy = Sequence(self.index, (), with_logprobs=False)
        copy.follow(self)
        copy.uniforms = self.uniforms
        copy.append(decoding, token)
        return copy


class Status(Enum):
    """The state of a group."""

    RESTORING = "restoring"  # its pages are being read from a disk; it waits after that
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class SequenceGroup:
    """All sequences of one request; they are admitted, preempted and aborted together.

    Attributes:
        num_cached_tokens: number of prompt tokens found in the cache at first admission, and of the encoder's input if
            it was encoded already.
        num_found: number of pages at the beginning of its table that were found in the cache when it was last admitted.
        parameters: the bytes of its row of the sampling table.
    """

    def __init__(
        self,
        request: Request,
        arrival: int,
        root: PageHash,
        encoder_input: EncoderInput | None = None,
        *,
        unchunked: bool = False,
        sides: Sides | None = None,
    ):
        decoding = request.decoding
        self.request = request
        self.arrival = arrival  # number that orders requests of equal priority
        self.root = root  # hash before the first page, which covers whatever changes K and V besides the tokens
        self.encoder_input = encoder_input  # the encoder's input and its pages, for an encoder-decoder model
        self.unchunked = unchunked  # whether its input is read whole, and stores nothing in pages
        self.pooled: Float64 | None = None  # its pooling result so far, if the input is computed in parts
        self.sides = request.sides if sides is None else sides  # facts about its first tokens beside their ids
        source = request.encoder_token_ids or request.prompt_token_ids
        source = () if request.signal is not None else source  # it has no tokens that an answer could repeat
        # the encoder's input, or the prompt of a decoder-only model, if its n-grams are not to be repeated
        self.source: Int32 = np.array(source if decoding.encoder_no_repeat_ngram_size else (), dtype=np.int32)
        # its distinct tokens, if these are favoured or disfavoured
        self.favoured: Int32 = np.unique(
            np.array(source if decoding.encoder_repetition_penalty != 1.0 else (), dtype=np.int32)
        )
        with_logprobs = decoding.logprobs is not None and decoding.num_beams > 1
        # the live ones; one until the first sample. Beams: best first.
        self.sequences = [Sequence(0, request.prompt_token_ids, with_logprobs=with_logprobs)]
        if decoding.constraint is not None:
            self.sequences[0].constraint = decoding.constraint.fork()
        self.status = Status.WAITING  # the group's current state
        self.started = False  # whether the first token was sampled
        # after a preemption, the number of tokens that all sequences have in common: the first sequence computes them
        # for all, then the others fork from it. None otherwise.
        self.fork_point: int | None = None
        self.beam: BeamSearch | None = None  # the rules of the beam search, None for sampling
        if decoding.num_beams > 1:
            self.beam = BeamSearch(
                num_beams=decoding.num_beams,
                length_penalty=decoding.length_penalty,
                early_stopping=decoding.early_stopping,
                stop_ids=decoding.stop_ids,
                max_tokens=decoding.max_tokens,
                distinct_ends=decoding.distinct_ends,
            )
        self.kept: list[Hypothesis] = []  # finished beams, best first
        self.settled = [0] * decoding.n  # number of tokens of each answer already sent (beams)
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]  # the values known so far; the first entry is None
        self.num_cached_tokens = self.num_found = 0
        self.admitted = False  # whether it has run before
        # `time.monotonic()` seconds at which it was first admitted, None before
        self.scheduled_time: float | None = None
        # They do not change from step to step, except for the columns that say what is drawn.
        self.parameters = neutral_rows(
            1,
            seed=np.array(decoding.seed & (2**64 - 1), dtype=np.uint64).view(np.int64),
            beam_width=0 if self.beam is None else self.beam.num_candidates,
            num_logprobs=-1 if decoding.logprobs is None else decoding.logprobs,
            renormalize=decoding.renormalize,
            **{name: getattr(decoding, name) for name in REQUESTED},
        ).tobytes()
        self.biased: tuple[Int32, Float32] | None = None  # tokens with a bias, and their biases; None if there are none
        if decoding.logit_bias:
            tokens, values = zip(*decoding.logit_bias, strict=True)
            self.biased = np.array(tokens, dtype=np.int32), np.array(values, dtype=np.float32)
        # has_penalties, has_bans, has_forced_tokens: whether sampling uses such
        self.has_penalties = (
            decoding.repetition_penalty != 1.0 or decoding.presence_penalty != 0.0 or decoding.frequency_penalty != 0.0
        )
        # whether its tokens are drawn, with numbers that follow from the seed
        self.draws = self.beam is None and decoding.temperature > 0.0
        self.seed = decoding.seed
        # whether its constraint may force tokens
        self.may_be_forced = isinstance(decoding.constraint, Forcing) and self.beam is None
        # whether sampling depends on which tokens came before, not only on their number
        self.heeds_tokens = self.has_penalties or bool(
            decoding.constraint is not None
            or decoding.dry is not None
            or decoding.no_repeat_ngram_size
            or decoding.encoder_no_repeat_ngram_size
            or any(len(word) > 1 for word in decoding.bad_words)
        )
        has_changing_bans = bool(
            decoding.min_tokens
            or decoding.min_length
            or decoding.begin_suppress_tokens
            or decoding.no_repeat_ngram_size
            or decoding.encoder_no_repeat_ngram_size
            or decoding.bad_words
        )
        self.has_bans = has_changing_bans or bool(decoding.suppress_tokens)
        # banned tokens that depend only on the place in the answer, by whether the answer begins, and its early ends
        self.lasting_bans: dict[tuple[bool, frozenset[int]], Int32] = {}
        self.has_forced_tokens = bool(decoding.forced_eos_token_ids) or decoding.forced_bos_token_id is not None
        # whether the penalised, banned or forced tokens change as the answer grows
        self.has_changing_edits = (
            self.has_penalties or decoding.dry is not None or has_changing_bans or self.has_forced_tokens
        )
        # whether it uses these, or biases, or favoured tokens
        self.has_edits = self.has_changing_edits or self.has_bans or self.biased is not None or len(self.favoured) > 0

    @property
    def key(self) -> tuple[int, int]:
        """The order in which running groups are served: lower priority number first, then arrival. A request's priority
        counts only among requests of its own tenant; other requests are ordered by arrival. Background requests come
        last."""
        own = self.request.tenant is not None and not self.is_background
        return (0 if own else self.request.priority, self.arrival)

    @property
    def is_background(self) -> bool:
        """See `Request.is_background`."""
        return self.request.is_background

    @property
    def rows(self) -> int:
        """Rows of a step to set aside for it."""
        if self.beam is not None or not self.started:
            return self.request.decoding.width
        return len(self.sequences)

    def work(self) -> list[tuple[Sequence, int]]:
        """The sequences with tokens to schedule now, and the numbers of these."""
        if self.fork_point is not None:
            first = self.sequences[0]
            return [(first, self.fork_point - first.num_computed)]
        return [(s, s.tokens.size + s.num_pending - s.num_computed - s.num_in_flight) for s in self.sequences]

    @property
    def num_missing(self) -> int:
        """Number of tokens to schedule now."""
        return sum([count for _, count in self.work()])

    def may_run_ahead(self, *, drafting: bool = False) -> bool:
        """Whether its next step can be planned although the answer of a step in flight is not known. It must run in
        that step. Tokens can only be drafted if the last one is known."""
        first = self.sequences[0]
        if not (first.num_in_flight or any(sequence.num_in_flight for sequence in self.sequences[1:])):
            return True
        decoding = self.request.decoding
        if self.fork_point is not None or self.request.pooling is not None:
            return False
        if not self.started and (decoding.prompt_logprobs is not None or (first.num_pending and decoding.width > 1)):
            return False
        if not first.num_pending:  # sequences of a group are sampled together
            return self.beam is None or not self.started
        if self.heeds_tokens or first.num_output + first.num_pending >= decoding.max_tokens:
            return False
        if self.beam is not None:  # all of its beams exist, and as many continue unless it reaches its end
            return self.beam.may_run_ahead and len(self.sequences) == self.beam.num_beams
        return not drafting

    def common_prefix(self) -> int:
        """The number of tokens that all sequences share, leaving each at least one to compute."""
        length = min(sequence.num_tokens for sequence in self.sequences) - 1
        first = self.sequences[0].tokens.view(0, length)
        for sequence in self.sequences[1:]:
            different = np.flatnonzero(first[:length] != sequence.tokens.view(0, length))
            if len(different):
                length = int(different[0])
        return length


def pages_needed(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def worst_case_pages(num_prompt: int, max_tokens: int, width: int, block_size: int) -> int:
    """The maximum pages that a request can ever hold at once.

    All sequences share the full pages of the prompt; everything after them may be separate for each. The last token is
    never computed.
    """
    longest = pages_needed(num_prompt + max_tokens - 1, block_size)
    if width == 1:
        return longest
    shared = num_prompt // block_size
    return shared + width * (longest - shared)
