"""Which rows of a batch are what, and what a device is told of it: host arrays alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.execution.transfers import Array
from engine.scheduling.plan import Float32, Int32, SamplingBatch

# Arrays of a batch that decide how its rows are laid out; the others are numbers that rows are treated with.
DECISIVE = ("beam_width", "num_draws", "num_logprobs", "renormalize")
PENALTIES = {"repetition": "repetition_penalty", "frequency": "frequency_penalty", "presence": "presence_penalty"}
FILTERS = ("temperature", "top_k", "top_p", "min_p")
TOUCHING = ("bias_row", "source_row", "history_row", "ban_row", "force_row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which rows of a batch are what.

    Attributes:
        width, number: columns of tokens, and of the most probable ones that are reported.
        touched: [N] rows whose logits are changed.
        place: [S] where among the touched rows a row is.
        beams: whether there are any.
        arrays: what the device needs of it.
    """

    width: int
    number: int
    touched: Int32
    place: Int32
    beams: bool
    arrays: dict[str, Array]


def lay_out(batch: SamplingBatch, touched: Int32, searching: Array, vocabulary: int) -> Layout:
    place = np.zeros(len(searching), dtype=np.int32)
    place[touched] = np.arange(len(touched), dtype=np.int32)
    apart = np.zeros(len(searching), dtype=np.bool_)
    apart[touched] = True
    plain = where_true(searching & ~apart)
    draws = np.where(searching, 0, batch.num_draws).astype(np.int32)
    arrays: dict[str, Array] = {"num_draws": np.where(apart, 0, draws).astype(np.int32)}
    if searching.any():
        arrays |= {"beam_rows": plain, "beam_counts": batch.beam_width[plain]}
    if len(touched):
        among = where_true(searching[touched])
        arrays |= {f"touched_{name}": getattr(batch, name)[touched] for name in FILTERS}
        arrays |= {f"touched_{name}": getattr(batch, of)[touched] for name, of in PENALTIES.items()}
        arrays |= {
            "touched": touched,
            "touched_num_draws": draws[touched],
            "touched_drawn": ~searching[touched],
            "touched_kept": ~(batch.renormalize & searching)[touched],
            "touched_beam_rows": among,
            "touched_beam_counts": batch.beam_width[touched[among]],
            "touched_beam_place": touched[among],
        }
    asking = where_true(batch.num_logprobs >= 0)
    if len(asking):
        arrays |= {"asking_rows": asking, "asking_counts": batch.num_logprobs[asking]}
    return Layout(
        width=int(max(draws.max(), min(int(batch.beam_width.max()), vocabulary), 1)),
        number=min(max(int(batch.num_logprobs.max()), 0), vocabulary),
        touched=touched,
        place=place,
        beams=bool(searching.any()),
        arrays=arrays,
    )


def places_of(batch: SamplingBatch, kind: str, place: Int32, tokens: Int32, vocabulary: int) -> dict[str, Array]:
    """What a kind of edit needs on the device; tokens outside the vocabulary, as an encoder with one of its own may
    have them, count for nothing."""
    known = tokens < vocabulary
    if kind == "history":
        return {
            "history_place": place[known],
            "history_token": tokens[known],
            "history_is_output": batch.history_is_output[known],
        }
    arrays: dict[str, Array] = {kind: (place.astype(np.int64) * vocabulary + tokens)[known]}
    if kind == "bias":
        arrays["bias_value"] = batch.bias_value[known]
    elif kind == "source":
        arrays["source_reward"] = batch.source_reward[batch.source_row][known]
    elif kind == "force":
        arrays["force_place"] = place.astype(np.int64)
    return arrays


def where_true(mask: Array) -> Int32:
    return np.flatnonzero(mask).astype(np.int32)


def trial_batch(vocabulary: int) -> SamplingBatch:
    """A row that draws, one of beams, and one that is changed and asks for reports: together they take all kernels."""

    def ints(*values: int) -> Int32:
        return np.array(values, dtype=np.int32)

    def floats(*values: float) -> Float32:
        return np.array(values, dtype=np.float32)

    none, ones, last = ints(), floats(1.0, 1.0, 1.0), vocabulary - 1
    return SamplingBatch(
        rows=ints(0, 1, 2),
        temperature=ones,
        top_k=ints(0, 0, 0),
        top_p=floats(0.9, 1.0, 0.9),
        min_p=floats(0.0, 0.0, 0.0),
        repetition_penalty=floats(1.0, 1.0, 1.1),
        presence_penalty=floats(0.0, 0.0, 0.0),
        frequency_penalty=floats(0.0, 0.0, 0.0),
        beam_width=ints(0, 2, 0),
        num_draws=ints(1, 0, 1),
        uniforms=np.full((3, 1), 0.5),
        num_logprobs=ints(-1, -1, 1),
        bias_row=none,
        bias_token=none,
        bias_value=floats(),
        history_row=ints(2, 2),
        history_token=ints(0, last),
        history_is_output=np.array([False, True]),
        renormalize=np.zeros(3, dtype=np.bool_),
        source_reward=ones,
        source_row=none,
        source_token=none,
        ban_row=none,
        ban_token=none,
        force_row=none,
        force_token=none,
    )
