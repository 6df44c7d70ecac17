"""What sampling asks of rows of logits on a CPU, without sorting or copying them."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.native.loading import Kernel
from engine.native.structures import structure

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

_ROWS = "piiip"
_SUMMARY = Kernel("logits_summary", f"{_ROWS} pppp p")
_BEST = Kernel("logits_best", f"{_ROWS} pp pp ii p pp pi")
_RANKS = Kernel("logits_ranks", f"{_ROWS} pp ii p")
_DRAW = Kernel("logits_draw", f"{_ROWS} pi pppp pp i pp ppp i")
_EDIT = Kernel("logits_edit", f"{_ROWS} pp p")
_RESTORE = Kernel("logits_restore", f"{_ROWS} p")
_FIELDS: dict[str, type[np.generic]] = {
    "bias_value": np.float32,
    "history_is_output": np.bool_,
    **dict.fromkeys(("source_reward", "repetition", "frequency", "presence"), np.float32),
    "apart": np.bool_,
}
# The numbers are those of src/sampling.h.
_CHUNK, _PIECE = 64, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """How each of M rows is drawn from.

    Attributes:
        temperature, top_p, min_p: [M] float32; temperatures above 0.
        top_k: [M] int32, 0 keeps all.
        counts: [M] int32 tokens to draw.
        uniforms: [M, largest count or more] float64 in [0, 1).
    """

    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    counts: Int32
    uniforms: Float64


_Tokens = structure("Tokens", "pointer start tokens")
_Edits = structure(
    "Edits",
    "Tokens bias source history ban | pointer bias_value history_is_output source_reward repetition frequency presence"
    " apart counts columns values before keys",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Tokens of rows: token i is one of row rows[i].

    Attributes:
        rows, tokens: [M] int32; tokens outside of the vocabulary count for nothing.
    """

    rows: Int32
    tokens: Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """What becomes of single logits, in this order.

    Attributes:
        bias: tokens whose `bias_value` [M] float32 is added.
        source: tokens, each once in a row, that get more probable by their row's `source_reward` [N] float32.
        history: tokens that `repetition`, `frequency` and `presence` [N] float32 make less probable, the latter two
            by how often `history_is_output` [M] is set for them.
        ban: tokens that become impossible.
        apart: [N] rows whose edits begin with log-probabilities.
    """

    bias: Listed
    bias_value: Float32
    source: Listed
    source_reward: Float32
    history: Listed
    history_is_output: Bool
    repetition: Float32
    frequency: Float32
    presence: Float32
    ban: Listed
    apart: Bool


class _Laid:
    """Edits as the kernels take them, and what they make of them.

    Attributes:
        start: [N + 1] where in `columns` and `values` those of each row begin.
        counts: [N] how many a row has.
    """

    def __init__(self, edits: Edits, rows: int):
        call = self.call = _Edits()
        self.address = ctypes.addressof(call)
        self._kept: list[NDArray[np.generic]] = []
        numbers = np.arange(rows + 1, dtype=np.int32)
        nothing = np.zeros(rows + 1, dtype=np.int64)
        self.start, total = nothing, 0
        for name, listed, values, field in (
            ("bias", edits.bias, edits.bias_value, "bias_value"),
            ("source", edits.source, None, ""),
            ("history", edits.history, edits.history_is_output, "history_is_output"),
            ("ban", edits.ban, None, ""),
        ):
            where, tokens = nothing, listed.tokens
            if len(tokens):
                order = np.argsort(listed.rows, kind="stable")
                where, tokens = np.searchsorted(listed.rows[order], numbers), tokens[order]
                if values is not None:
                    setattr(call, field, self._keep(values[order], _FIELDS[field]))
                self.start = self.start + where
                total += len(tokens)
            setattr(call, name, _Tokens(self._keep(where, np.int64), self._keep(tokens, np.int32)))
        for field, row_values in (
            ("source_reward", edits.source_reward),
            ("repetition", edits.repetition),
            ("frequency", edits.frequency),
            ("presence", edits.presence),
            ("apart", edits.apart),
        ):
            setattr(call, field, self._keep(row_values, _FIELDS[field]))
        made = torch.empty((3, total), dtype=torch.float32)
        keys, counts = torch.empty(2 * total, dtype=torch.int64), torch.empty(rows, dtype=torch.int64)
        first = made.data_ptr()
        call.values, call.columns, call.before = first, first + 4 * total, first + 8 * total
        call.keys, call.counts = keys.data_ptr(), counts.data_ptr()
        numbers_made: Float32 = made.numpy()
        self.values, self.columns = numbers_made[0], numbers_made[1].view(np.int32)
        self.counts: Int64 = counts.numpy()
        self._memory = (made, keys, counts)

    def _keep(self, values: NDArray[np.generic], dtype: type[np.generic]) -> int:
        self._kept.append(values)
        return _address(values, dtype)


class LogitRows:
    """Rows of logits that have been walked over once.

    Args:
        logits: float32 [N, vocabulary] on a CPU; kept, and changed while edits last.

    Attributes:
        values: [N, vocabulary] the logits, in the same memory where that is possible.
        peak: [N] the largest logit of each row; 0 where `log_sum` is NaN.
        place: [N] the first token that has it; 0 there.
        log_sum: [N] log of the sum of exp(logit - peak); NaN for a row that has NaN or inf, or nothing but -inf.

    Raises:
        ValueError: they are something else.
    """

    def __init__(self, logits: Tensor):
        if logits.dtype != torch.float32 or not logits.is_cpu or logits.dim() != 2 or not logits.shape[1]:
            raise ValueError(f"rows of float32 on a CPU, not {list(logits.shape)} of {logits.dtype} on {logits.device}")
        if logits.stride(1) != 1 or (logits.shape[0] > 1 and logits.stride(0) < logits.shape[1]):
            logits = logits.contiguous()
        rows, columns = logits.shape
        self.values: Float32 = logits.numpy()
        self._tops = torch.empty((rows, -(-columns // _CHUNK)), dtype=torch.float32)
        self._rows = (logits.data_ptr(), rows, columns, logits.stride(0), self._tops.data_ptr())
        found = torch.empty((3, rows), dtype=torch.float32)
        peak = found.data_ptr()
        self._log_probability = (peak, peak + 4 * rows)
        pieces = rows * -(-columns // _PIECE)
        room = torch.empty(3 * pieces, dtype=torch.float32)  # sums in float64 first, then the maxima
        sums = room.data_ptr()
        _SUMMARY.call(*self._rows, *self._log_probability, peak + 8 * rows, sums + 8 * pieces, sums)
        self._found: Float32 = found.numpy()
        self.peak, self.log_sum = self._found[0], self._found[1]
        self.place: Int32 = self._found[2].view(np.int32)
        self._edits: _Laid | None = None

    def __len__(self) -> int:
        return self._rows[1]

    @property
    def vocabulary(self) -> int:
        return self._rows[2]

    def logprobs(self, tokens: Int32) -> Float32:
        """Log-probabilities of tokens [N, C] as the rows are now; NaN where `log_sum` is."""
        logits: Float32 = self.values[np.arange(len(self))[:, None], tokens]
        found: Float32 = (logits - self.peak[:, None]) - self.log_sum[:, None]
        return found

    def best(self, rows: Int32, counts: Int32, width: int) -> tuple[Int32, Float32]:
        """The `counts` most probable tokens of rows, best first, the lowest of equal ones first.

        Args:
            rows, counts: [M] int32.
            width: columns of the result, at least the largest count (or the vocabulary, if that is less).

        Returns:
            Tokens and log-probabilities [M, width]: NaN for a row whose `log_sum` is, -inf beyond its count.
        """
        columns = torch.empty((len(rows), width), dtype=torch.int32)
        scores = torch.empty((len(rows), width), dtype=torch.float32)
        if len(rows) and width:
            threads = torch.get_num_threads()
            keys = torch.empty(2 * threads * self.vocabulary, dtype=torch.int64)
            _BEST.call(
                *self._rows,
                *self._log_probability,
                _address(rows, np.int32),
                _address(counts, np.int32),
                len(rows),
                width,
                None if self._edits is None else self._edits.address,
                columns.data_ptr(),
                scores.data_ptr(),
                keys.data_ptr(),
                threads,
            )
        return columns.numpy(), scores.numpy()

    def ranks(self, rows: Int32, tokens: Int32) -> Int32:
        """How many logits of rows [M] are larger than those of tokens [M, C], and one: [M, C]."""
        tokens = np.ascontiguousarray(tokens, dtype=np.int32)
        found = torch.empty(tokens.shape, dtype=torch.int32)
        _RANKS.call(*self._rows, _address(rows, np.int32), _address(tokens, np.int32), *tokens.shape, found.data_ptr())
        return found.numpy()

    def draw(self, rows: Int32, draws: Draws) -> tuple[Int32, Int32]:
        """Tokens drawn from rows [M] after temperature, top-k, top-p and min-p, as `transformers` has them.

        A draw is where running sums of the weights in vocabulary order, in float64, pass its uniform number's share
        of the whole. Logits that are equal to the last that a filter keeps stay, too.

        Args:
            rows: int32.
            draws: how, for each of them.

        Returns:
            Tokens [M, C], 0 beyond a row's count and where no token is possible; and whether all tokens had to be
            asked for a row's top-p [M], because it is not among the few most probable ones.
        """
        most = draws.uniforms.shape[1]
        tokens = torch.empty((len(rows), most), dtype=torch.int32)
        wide = torch.empty(len(rows), dtype=torch.int32)
        threads = torch.get_num_threads()
        sums = torch.empty(threads * self._tops.shape[1], dtype=torch.float64)
        keys = torch.empty(2 * threads * self.vocabulary, dtype=torch.int64)
        weights = torch.empty(threads * self.vocabulary, dtype=torch.float32)
        _DRAW.call(
            *self._rows,
            _address(rows, np.int32),
            len(rows),
            _address(draws.temperature, np.float32),
            _address(draws.top_k, np.int32),
            _address(draws.top_p, np.float32),
            _address(draws.min_p, np.float32),
            _address(draws.counts, np.int32),
            _address(draws.uniforms, np.float64),
            most,
            tokens.data_ptr(),
            wide.data_ptr(),
            sums.data_ptr(),
            keys.data_ptr(),
            weights.data_ptr(),
            threads,
        )
        return tokens.numpy(), wide.numpy()

    @contextlib.contextmanager
    def edited(self, edits: Edits) -> Iterator[None]:
        """Writes edits into the rows for a while. `best` and `draw` see them; `peak`, `place` and `log_sum` stay.

        In rows that are `apart` tokens with edits are -inf for all but `best`, which knows what became of their
        log-probabilities; `put` has them, too.
        """
        laid = _Laid(edits, len(self))
        _EDIT.call(*self._rows, *self._log_probability, laid.address)
        self._edits = laid
        try:
            yield
        finally:
            self._edits = None
            _RESTORE.call(*self._rows, laid.address)

    def put(self, row: int, logprobs: Float32) -> None:
        """Write the edits of a row that is `apart` into its log-probabilities [vocabulary]."""
        if self._edits is not None:
            first = int(self._edits.start[row])
            made = slice(first, first + int(self._edits.counts[row]))
            logprobs[self._edits.columns[made]] = self._edits.values[made]


def _address(values: NDArray[np.generic], dtype: type[np.generic]) -> int:
    if values.dtype != dtype or not values.flags.c_contiguous:
        raise ValueError(f"expected {dtype.__name__}, side by side, not {values.dtype} with strides {values.strides}")
    address: int = values.__array_interface__["data"][0]
    return address
