"""Sampling operations on rows of logits on a CPU, without sorting or copying the rows."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.native.loading import Kernel
from engine.backends.native.structures import TWINS, structure
from engine.interface.sampling_table import EDIT, TABLE, EditList, Masks, Table, by_torch, mask_words

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

_ROWS = "piiip"
_SUMMARY = Kernel("logits_summary", f"{_ROWS} pppp p")
_BEST = Kernel("logits_best", f"{_ROWS} pp pp ii p pp pi")
_RANKS = Kernel("logits_ranks", f"{_ROWS} pp ii p")
_DRAW = Kernel("logits_draw", f"{_ROWS} pi p pi pp ppp i")
_EDIT = Kernel("logits_edit", f"{_ROWS} pp p")
_MASK = Kernel("logits_mask", "pii pi pi")
_CONFINE = Kernel("logits_confine", f"{_ROWS} pi pi pp i")
_RESTORE = Kernel("logits_restore", f"{_ROWS} p")
# These numbers equal those in src/sampling.h.
_CHUNK, _PIECE = 64, 4096


_Edits = structure("Edits", "pointer start edits repetition frequency presence apart counts columns values before keys")
TWINS |= {name: (kind.itemsize, len(kind.names or ())) for name, kind in (("Row", TABLE), ("Edit", EDIT))}


class _Laid:
    """Edits in the kernels' form, and their results."""

    def __init__(self, edits: EditList, table: Table, apart: Bool):
        rows, total = len(table), len(edits)
        # [N + 1] first index of each row's edits in `columns` and `values`
        self.start = np.searchsorted(edits["row"], np.arange(rows + 1, dtype=np.int32))
        penalties = [np.ascontiguousarray(table[f"{name}_penalty"]) for name in ("repetition", "frequency", "presence")]
        self._kept = (edits, *penalties, apart)
        made = torch.empty((3, total), dtype=torch.float32)
        keys, counts = torch.empty(2 * total, dtype=torch.int64), torch.empty(rows, dtype=torch.int64)
        first = made.data_ptr()
        call = self._call = _Edits(
            _address(self.start, np.int64),
            _address(edits, EDIT),
            *(_address(values, np.float32) for values in penalties),
            _address(apart, np.bool_),
            counts.data_ptr(),
            first + 4 * total,
            first,
            first + 8 * total,
            keys.data_ptr(),
        )
        self.address = ctypes.addressof(call)
        numbers_made: Float32 = made.numpy()
        self.values, self.columns = numbers_made[0], numbers_made[1].view(np.int32)
        self.counts: Int64 = counts.numpy()  # [N] number of edits per row
        self._memory = (made, keys, counts)


class LogitRows:
    """Rows of logits with statistics from one pass over them. Raises ValueError if the logits have another form.
    `logits`: float32 [N, vocabulary] on a CPU; kept, and changed while edits apply.

    Attributes:
        peak: [N] the largest logit of each row; 0 if `log_sum` is NaN.
        log_sum: [N] log of the sum of exp(logit - peak); NaN for a row with NaN or inf, or with nothing but -inf.
    """

    def __init__(self, logits: Tensor):
        if logits.dtype != torch.float32 or not logits.is_cpu or logits.dim() != 2 or not logits.shape[1]:
            raise ValueError(
                f"logits must be rows of float32 on a CPU, got {list(logits.shape)} of {logits.dtype} on "
                f"{logits.device}"
            )
        if logits.stride(1) != 1 or (logits.shape[0] > 1 and logits.stride(0) < logits.shape[1]):
            logits = logits.contiguous()
        rows, columns = logits.shape
        self.values: Float32 = logits.numpy()  # [N, vocabulary] the logits, in the same memory if possible
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
        self.place: Int32 = self._found[2].view(np.int32)  # [N] the first token with that logit; 0 in that case
        self._edits: _Laid | None = None

    def __len__(self) -> int:
        return self._rows[1]

    @property
    def vocabulary(self) -> int:
        return self._rows[2]

    def logprobs(self, tokens: Int32) -> Float32:
        """Current log-probabilities of tokens [N, C]; NaN where `log_sum` is NaN."""
        logits: Float32 = self.values[np.arange(len(self))[:, None], tokens]
        found: Float32 = (logits - self.peak[:, None]) - self.log_sum[:, None]
        return found

    def best(self, rows: Int32, counts: Int32, width: int) -> tuple[Int32, Float32]:
        """The `counts` most probable tokens of rows, best first; equal ones in ascending order.

        Args:
            rows, counts: [M] int32.
            width: columns of the result, at least the largest count (or the vocabulary, if that is less).

        Returns: Tokens and log-probabilities [M, width]: NaN for a row whose `log_sum` is NaN, -inf beyond its count.
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
        """One plus the number of logits of rows [M] that are larger than those of tokens [M, C]: [M, C]."""
        tokens = np.ascontiguousarray(tokens, dtype=np.int32)
        found = torch.empty(tokens.shape, dtype=torch.int32)
        _RANKS.call(*self._rows, _address(rows, np.int32), _address(tokens, np.int32), *tokens.shape, found.data_ptr())
        return found.numpy()

    def draw(self, rows: Int32, table: Table, uniforms: Float64) -> tuple[Int32, Int32]:
        """Tokens sampled from rows [M] after temperature, top-k, top-p and min-p, as in `transformers`. These rows use
        no other filters (`by_torch`).

        A uniform number, times the sum of all weights, selects the token at which the running sum of weights in
        vocabulary order (float64) passes it. Tokens whose logits equal the last kept one are kept too.

        Args:
            table: [M] parameters of the rows; temperatures are above 0.
            uniforms: [M, at least the largest number of draws] float64 in [0, 1).

        Returns: Tokens [M, C], 0 beyond a row's number of draws and if no token is possible; and [M] whether a row's
            top-p needed all tokens, because its limit is not among the few most probable ones.
        """
        most = uniforms.shape[1]
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
            _address(table, TABLE),
            _address(uniforms, np.float64),
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
    def edited(self, edits: EditList, table: Table, apart: Bool) -> Iterator[None]:
        """Write edits [E] into the rows within a block, with the penalties of a table [N]; the caller applies forced
        tokens. `best` and `draw` see them; `peak`, `place` and `log_sum` do not change.

        In rows that are `apart` [N], edits start from log-probabilities; there, edited tokens are -inf for all methods
        except `best` and `put`, which use their edited log-probabilities.
        """
        laid = _Laid(edits, table, apart)
        _EDIT.call(*self._rows, *self._log_probability, laid.address)
        self._edits = laid
        try:
            yield
        finally:
            self._edits = None
            _RESTORE.call(*self._rows, laid.address)

    @contextlib.contextmanager
    def confined(self, rows: Int32, masks: Masks, table: Table, drawn: Bool) -> Iterator[None]:
        """Make tokens impossible in rows [M] within a block: those whose bits in masks [M, words] are 0
        (`engine.interface.sampling_table.mask_words`). `peak`, `place` and `log_sum` do not change.

        Only the parts are written that will be read: by `draw`, or torch's sampler, in rows that are `drawn` [M] with
        the parameters of a table [M], and by `best` for one token in the others. If no token of a chunk is possible,
        usually only its maximum is written.
        """
        if masks.shape != (len(rows), mask_words(self.vocabulary)):
            raise ValueError(f"{masks.shape} words do not mask {len(rows)} rows of {self.vocabulary} tokens")
        before = torch.empty((len(rows), self._tops.shape[1] + self.vocabulary), dtype=torch.float32)
        # With top-k, too: if fewer chunks than that have a possible token, all chunks are read.
        written: Bool = drawn & ((table["top_p"] < 1) | (table["top_k"] > 0) | by_torch(table))
        laid = (_address(rows, np.int32), len(rows), _address(masks, np.uint32), masks.shape[1])
        made = (_address(written, np.bool_), before.data_ptr())
        _CONFINE.call(*self._rows, *laid, *made, 0)
        try:
            yield
        finally:
            _CONFINE.call(*self._rows, *laid, *made, 1)

    def put(self, row: int, logprobs: Float32) -> None:
        """Write the edits of a row that is `apart` into its log-probabilities [vocabulary]."""
        if self._edits is not None:
            first = int(self._edits.start[row])
            made = slice(first, first + int(self._edits.counts[row]))
            logprobs[self._edits.columns[made]] = self._edits.values[made]


def mask(logits: Float32, rows: Int32, masks: Masks) -> None:
    """Make tokens impossible in contiguous rows [M] of logits [N, vocabulary]: those whose bits in masks [M, words] are
    0 (`engine.interface.sampling_table.mask_words`)."""
    vocabulary = logits.shape[1]
    if masks.shape != (len(rows), mask_words(vocabulary)):
        raise ValueError(f"{masks.shape} words do not mask {len(rows)} rows of {vocabulary} tokens")
    _MASK.call(
        _address(logits, np.float32),
        vocabulary,
        vocabulary,
        _address(rows, np.int32),
        len(rows),
        _address(masks, np.uint32),
        masks.shape[1],
    )


def _address(values: NDArray[Any], dtype: Any) -> int:
    if values.dtype != dtype or not values.flags.c_contiguous:
        raise ValueError(f"expected {np.dtype(dtype)}, contiguous, got {values.dtype} with strides {values.strides}")
    address: int = values.__array_interface__["data"][0]
    return address
