"""Logits to candidates with the kernels of `engine.backends.triton`, without waiting for the device (`sampler.py`
describes the results).

Nothing here queries the device: the number of rows of each kind follows from the host's arrays, and only the kernels
need to know how many tokens a filter keeps. Rows with filters that the kernels do not support are the exception: torch
draws from them. A batch's settings are sent in one copy; a steady step needs only what changed. Rows whose logits are
changed (penalties, biases, bans, forced tokens, renormalised beams) are computed separately from the others, in
separate memory.

`CapturedSampler` (`sampler_captured.py`) is the part of this that a CUDA graph can contain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.backends.torch import sampling_whole
from engine.backends.triton.sampling import SIZES, LogitRows, Parameters, Sizes, Workspace
from engine.backends.triton.sampling_edit import mask, penalize
from engine.execution.sampler_layout import Layout, edit_arrays, lay_out, touched_rows, trial_batch, words
from engine.execution.transfers import Array, Download, Uploads
from engine.interface.sampling_table import neutral_rows, new_version
from engine.scheduling.plan import Int32, SamplingBatch, StepResult, TokenScores

_NEGATIVE_INFINITY = float("-inf")


@dataclass(slots=True, kw_only=True)
class DeviceSamples:
    """The sampled tokens on the device; valid until the sampler is used again, except for those that were fetched."""

    # tokens, logprobs: [S, C] as in `StepResult`
    tokens: Tensor
    logprobs: Tensor
    # [S] int32 first column of the tokens, at an address that stays the same for up to the sampler's `max_rows`
    first: Tensor
    # scores, ranks: [S, C]; None if no row has any
    scores: Tensor | None
    ranks: Tensor | None
    # top_ids, top_logprobs: [S, L]; None if no row has any
    top_ids: Tensor | None
    top_logprobs: Tensor | None
    _packed: Tensor
    watched: Tensor | None = None  # [S, W]; None if no row has any
    _download: Download | None = None
    _watched: Download | None = None

    def fetch(self) -> None:
        """Start the copy to the host, on the current stream; nothing waits for it."""
        if self.watched is not None:
            self._watched = Download(self.watched)
        self._download = Download(self._packed)

    @property
    def ready(self) -> bool:
        """Whether the values are on the host, so that `result` does not wait."""
        return self._download is not None and self._download.ready

    def result(self) -> StepResult:
        """The values on the host: waits until they are there."""
        if self._download is None:
            self.fetch()
        assert self._download is not None
        words = self._download.wait()
        rows, columns = self.tokens.shape
        place = 0

        def take(width: int, kind: type[np.generic]) -> Array:
            nonlocal place
            begin, place = place, place + _aligned(rows * width)
            return words[begin : begin + rows * width].view(kind).reshape(rows, width)

        number = 0 if self.top_ids is None else self.top_ids.shape[1]
        tokens, logprobs = take(columns, np.int32), take(columns, np.float32)
        scores = np.full(tokens.shape, -np.inf, dtype=np.float32)
        ranks = np.zeros(tokens.shape, dtype=np.int32)
        return StepResult(
            tokens=tokens,
            logprobs=logprobs,
            scores=scores if self.scores is None else take(columns, np.float32),
            ranks=ranks if self.ranks is None else take(columns, np.int32),
            top_ids=take(number, np.int32),
            top_logprobs=take(number, np.float32),
            watched=None if self._watched is None else self._watched.wait(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceScores:
    """`TokenScores` on their way to the host."""

    logprobs: Download
    ranks: Download
    top_ids: Download
    top_logprobs: Download

    @property
    def ready(self) -> bool:
        """Whether all values are on the host, so that `result` does not wait."""
        return self.top_logprobs.ready  # the last copy that was started

    def result(self) -> TokenScores:
        """The values on the host: waits until they are there."""
        return TokenScores(
            logprobs=self.logprobs.wait(),
            ranks=self.ranks.wait(),
            top_ids=self.top_ids.wait(),
            top_logprobs=self.top_logprobs.wait(),
        )


class DeviceSampler:
    """Samples on one device, and keeps what steps have in common.

    Args:
        max_rows: rows for which memory is allocated at once; more are served, too.
        sizes: how kernels divide their work; tests use small sizes.
        first: int32 memory for the first tokens of the maximum number of rows; None allocates some.
    """

    def __init__(self, device: torch.device, max_rows: int = 0, sizes: Sizes = SIZES, *, first: Tensor | None = None):
        self._device, self._max_rows, self._sizes = device, max_rows, sizes
        self.uploads = Uploads(device)
        self._rooms: dict[str, Workspace] = {}
        self._output = torch.empty(0, dtype=torch.int32, device=device)
        self._first = torch.zeros(max_rows, dtype=torch.int32, device=device) if first is None else first
        self._layout: Layout | None = None
        self._vocabulary = 0
        # Versions of the batch and its edits that are laid out, and of the edits and the layout from which arrays were
        # made.
        self._laid = self._edited = (0, 0)
        self._edit_arrays: dict[str, Array] = {}
        self._edit_version = 0

    @torch.inference_mode()
    def sample(self, logits: Tensor, batch: SamplingBatch) -> DeviceSamples:
        """Candidates for each row of logits [S, vocabulary]."""
        rows, vocabulary = logits.shape
        layout = self._lay(batch, vocabulary)
        edits = self._edits(batch, layout, vocabulary)
        versions = dict.fromkeys(layout.arrays, layout.version) | dict.fromkeys(edits, self._edit_version)
        arrays = {"uniforms": batch.uniforms, **layout.arrays, **edits}
        if len(batch.masked):
            arrays |= {"masked": layout.place[batch.masked], "masks": batch.masks.view(np.int32)}
        if batch.watched is not None:
            arrays["watched"] = batch.watched
        given = self.uploads.put(arrays, versions)
        samples, chosen = self._outputs(rows, layout)
        parameters = Parameters(table=given["table"], uniforms=given["uniforms"])
        walked = LogitRows(logits, parameters, self._room("all", rows, vocabulary))
        walked.choose(samples.tokens, chosen)
        scores = samples.scores
        if scores is not None:
            scores.fill_(_NEGATIVE_INFINITY)
            walked.best(
                given["beam_rows"],
                given["beam_counts"],
                samples.tokens,
                scores,
                before=walked.peak,
                after=walked.log_sum,
                chosen=chosen,
            )
        if len(layout.touched):
            changed = self._change(walked, layout, given, samples, chosen)
            self._draw_by_torch(changed, layout, batch, samples, chosen)
        walked.report(samples.tokens, chosen, samples.logprobs, samples.first)
        if "watched" in given:
            logit = logits.gather(1, given["watched"].long()).float()
            samples.watched = (logit - walked.peak[:rows, None]) - walked.log_sum[:rows, None]
        if samples.ranks is not None:
            asking = given["asking_rows"]
            samples.ranks.zero_()
            walked.ranks(asking, samples.tokens, samples.ranks)
            if samples.top_ids is not None and samples.top_logprobs is not None:
                samples.top_ids.zero_()
                samples.top_logprobs.zero_()
                walked.best(
                    asking,
                    given["asking_counts"],
                    samples.top_ids,
                    samples.top_logprobs,
                    before=walked.peak,
                    after=walked.log_sum,
                )
        return samples

    def warm(self, vocabulary: int) -> None:
        """Compile all kernels for float32 logits of this many tokens, and allocate memory for `max_rows` rows, so that
        no request waits for that."""
        logits = torch.zeros((3, vocabulary), dtype=torch.float32, device=self._device)
        self.sample(logits, trial_batch(vocabulary)).result()

    @torch.inference_mode()
    def score(self, logits: Tensor, targets: Int32, counts: Int32, width: int) -> DeviceScores:
        """Log-probability, rank and best alternatives [P, width] of target tokens of logits [P, vocabulary].

        Nothing waits for the device, and other rows may be scored before these are fetched.
        """
        rows, vocabulary = logits.shape
        table = words(neutral_rows(rows, temperature=0.0, num_draws=0))
        arrays: dict[str, Array] = {"table": table, "targets": targets, "counts": counts}
        given = Uploads(self._device).put(arrays | {"uniforms": np.zeros((rows, 1))})
        parameters = Parameters(table=given["table"], uniforms=given["uniforms"])
        walked = LogitRows(logits, parameters, self._room("all", rows, vocabulary))
        unused = torch.empty((2, _aligned(rows)), dtype=torch.int32, device=self._device)[:, :rows, None]
        walked.choose(unused[0], unused[1].view(torch.float32))
        everyone = walked.room.every[:rows]
        logprobs = torch.empty((rows, 1), dtype=torch.float32, device=self._device)
        column = given["targets"].view(-1, 1)
        walked.report(column, torch.zeros_like(logprobs), logprobs, unused[0][:, 0])
        ranks = torch.empty_like(column)
        walked.ranks(everyone, column, ranks)
        top_ids = torch.zeros((rows, width), dtype=torch.int32, device=self._device)
        top_logprobs = torch.zeros((rows, width), dtype=torch.float32, device=self._device)
        walked.best(everyone, given["counts"], top_ids, top_logprobs, before=walked.peak, after=walked.log_sum)
        return DeviceScores(
            logprobs=Download(logprobs[:, 0]),
            ranks=Download(ranks[:, 0]),
            top_ids=Download(top_ids),
            top_logprobs=Download(top_logprobs),
        )

    def _room(self, name: str, rows: int, vocabulary: int) -> Workspace:
        known = self._rooms.get(name)
        if known is None or known.rows < rows or known.vocabulary != vocabulary:
            most = max(rows, self._max_rows if name == "all" else 0)
            known = self._rooms[name] = Workspace(most, vocabulary, self._device, self._sizes)
        return known

    def _outputs(self, rows: int, layout: Layout) -> tuple[DeviceSamples, Tensor]:
        """Views of the output's memory, and memory for the logits of chosen tokens."""
        width, number = layout.width, layout.number
        asked = "asking_rows" in layout.arrays
        parts = [rows * part for part in (width, width, width * layout.beams, width * asked, number, number)]
        words = sum(map(_aligned, parts))
        if words > len(self._output):
            self._output = torch.empty(max(words, 2 * self._max_rows), dtype=torch.int32, device=self._device)
        if rows > len(self._first):
            self._first = torch.zeros(rows, dtype=torch.int32, device=self._device)
        tokens, logprobs, scores, ranks, top_ids, top_logprobs = (
            memory[:part].view(rows, -1) if part else None
            for memory, part in zip(torch.split(self._output[:words], [*map(_aligned, parts)]), parts, strict=True)
        )
        assert tokens is not None
        assert logprobs is not None
        samples = DeviceSamples(
            tokens=tokens,
            logprobs=logprobs.view(torch.float32),
            first=self._first[:rows],
            scores=None if scores is None else scores.view(torch.float32),
            ranks=ranks,
            top_ids=top_ids,
            top_logprobs=None if top_logprobs is None else top_logprobs.view(torch.float32),
            _packed=self._output[:words],
        )
        return samples, torch.empty((rows, width), dtype=torch.float32, device=self._device)

    def _lay(self, batch: SamplingBatch, vocabulary: int) -> Layout:
        """The layout of the batch's rows: the last step's, if it is the same."""
        last = self._layout if self._laid[:1] == (batch.version,) and self._vocabulary == vocabulary else None
        if last is None or self._laid != (batch.version, batch.edits_version) or len(batch.masked):
            touched = touched_rows(batch)
            if last is None or not np.array_equal(last.touched, touched):
                last = self._layout = lay_out(batch, touched, vocabulary)
        self._vocabulary, self._laid = vocabulary, (batch.version, batch.edits_version)
        return last

    def _edits(self, batch: SamplingBatch, layout: Layout, vocabulary: int) -> dict[str, Array]:
        """The edits on the device: the last step's, if they are the same."""
        known = (batch.edits_version, layout.version)
        if known != self._edited:
            self._edited, self._edit_version = known, new_version()
            self._edit_arrays = edit_arrays(batch.edits, layout.place, vocabulary)
        return self._edit_arrays

    def _change(
        self, walked: LogitRows, layout: Layout, given: dict[str, Tensor], samples: DeviceSamples, chosen: Tensor
    ) -> Tensor:
        """Candidates of the rows whose logits are changed, and the changed logits [N, vocabulary]."""
        touched = given["touched"]
        index = touched.long()
        vocabulary = walked.logits.shape[1]
        logits = walked.logits.index_select(0, index).float()
        if samples.scores is not None:
            # Beams begin with log-probabilities; nothing is subtracted for the others.
            for taken in (walked.peak, walked.log_sum):
                logits -= taken.index_select(0, index).masked_fill(given["touched_drawn"], 0.0)[:, None]
        flat = logits.view(-1)
        if "bias" in given:
            flat.index_put_((given["bias"],), given["bias_value"], accumulate=True)
        if "source" in given:
            where, reward = given["source"], given["source_value"]
            score = flat.index_select(0, where)
            flat.index_copy_(0, where, torch.where(score < 0, score * reward, score / reward))
        if "history_place" in given:
            penalize(
                logits,
                given["history_place"],
                given["history_token"],
                given["history_is_output"],
                given["touched_table"],
            )
        if "dry" in given:
            where = given["dry"]
            flat.index_copy_(0, where, flat.index_select(0, where) - given["dry_value"])
        if "ban" in given:
            flat.index_fill_(0, given["ban"], _NEGATIVE_INFINITY)
        if "masks" in given:
            mask(logits, given["masked"], given["masks"])
        if "force" in given:
            logits.index_fill_(0, given["force_place"], _NEGATIVE_INFINITY)
            flat.index_fill_(0, given["force"], 0.0)
        parameters = Parameters(table=given["touched_table"], uniforms=given["uniforms"].index_select(0, index))
        changed = LogitRows(logits, parameters, self._room("touched", len(touched), vocabulary))
        changed.choose(samples.tokens, chosen, touched)
        if samples.scores is not None:
            kept = given["touched_kept"]
            changed.best(
                given["touched_beam_rows"],
                given["touched_beam_counts"],
                samples.tokens,
                samples.scores,
                before=changed.peak.masked_fill(kept, 0.0),
                after=changed.log_sum.masked_fill(kept, 0.0),
                chosen=chosen,
                place=given["touched_beam_place"],
            )
        return logits

    def _draw_by_torch(
        self, changed: Tensor, layout: Layout, batch: SamplingBatch, samples: DeviceSamples, chosen: Tensor
    ) -> None:
        """Draws of the rows with filters that the kernels do not know. Only these draws wait for the device."""
        for row in layout.by_torch.tolist():
            logits = changed[layout.place[row]]
            drawn = sampling_whole.draw(logits, batch.table[row : row + 1], batch.uniforms[row])
            samples.tokens[row, : len(drawn)] = drawn
            chosen[row, : len(drawn)] = logits[drawn]


def _aligned(words: int) -> int:
    """4-byte words arranged so that the next array begins where kernels expect memory to begin: at multiples of 16
    bytes."""
    return -(-words // 4) * 4
