"""The kinds of a batch's rows, and their description for a device, using only host arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.execution.transfers import Array
from engine.interface.sampling_table import (
    EDIT,
    WORDS,
    EditList,
    Kind,
    Table,
    by_torch,
    mask_words,
    neutral_rows,
    new_version,
)
from engine.scheduling.plan import Int32, SamplingBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The kinds of a batch's rows."""

    # width, number: the numbers of columns for tokens, and for the most probable ones that are reported
    width: int
    number: int
    touched: Int32  # [N] rows whose logits are changed, or from which torch's sampler draws
    place: Int32  # [S] a row's index among the touched rows
    by_torch: Int32
    beams: bool
    arrays: dict[str, Array]  # what the device needs of it
    version: int


def touched_rows(batch: SamplingBatch) -> Int32:
    """Rows whose logits are changed, or from which torch's sampler draws: it works on copies."""
    mask = (batch.table["renormalize"] > 0) & (batch.table["beam_width"] > 0)
    mask[batch.edits["row"]] = True
    mask[batch.masked] = True
    mask |= by_torch(batch.table)
    return where_true(mask)


def lay_out(batch: SamplingBatch, touched: Int32, vocabulary: int) -> Layout:
    table = batch.table
    searching, reports = table["beam_width"] > 0, table["num_logprobs"]
    place = np.zeros(len(searching), dtype=np.int32)
    place[touched] = np.arange(len(touched), dtype=np.int32)
    apart = np.zeros(len(searching), dtype=np.bool_)
    apart[touched] = True
    plain = where_true(searching & ~apart)
    draws = np.where(searching, 0, table["num_draws"])
    own = table.copy()
    own["num_draws"] = np.where(apart, 0, draws)
    arrays: dict[str, Array] = {"table": words(own)}
    if searching.any():
        arrays |= {"beam_rows": plain, "beam_counts": table["beam_width"][plain]}
    if len(touched):
        among = where_true(searching[touched])
        changed = table[touched]
        changed["num_draws"] = np.where(by_torch(changed), 0, draws[touched])
        arrays |= {
            "touched": touched,
            "touched_table": words(changed),
            "touched_drawn": ~searching[touched],
            "touched_kept": ~((changed["renormalize"] > 0) & searching[touched]),
            "touched_beam_rows": among,
            "touched_beam_counts": changed["beam_width"][among],
            "touched_beam_place": touched[among],
        }
    asking = where_true(reports >= 0)
    if len(asking):
        arrays |= {"asking_rows": asking, "asking_counts": reports[asking]}
    return Layout(
        width=int(max(draws.max(), min(int(table["beam_width"].max()), vocabulary), 1)),
        number=min(max(int(reports.max()), 0), vocabulary),
        touched=touched,
        place=place,
        by_torch=where_true(by_torch(table)),
        beams=bool(searching.any()),
        arrays=arrays,
        version=new_version(),
    )


def edit_arrays(edits: EditList, place: Int32, vocabulary: int) -> dict[str, Array]:
    """The description of edits for a device, by kind: positions in the touched rows' logits. Tokens outside the
    vocabulary, which an encoder with a different vocabulary may have, are ignored. `place`: [S] a row's index among the
    touched rows."""
    arrays: dict[str, Array] = {}
    edits = edits[edits["token"] < vocabulary]
    for kind in Kind:
        chosen = edits[edits["kind"] == kind]
        if not len(chosen):
            continue
        rows, name = place[chosen["row"]], kind.name.lower()
        if kind is Kind.HISTORY:
            tokens = np.ascontiguousarray(chosen["token"])
            arrays |= {"history_place": rows, "history_token": tokens, "history_is_output": chosen["value"] > 0}
            continue
        arrays[name] = rows.astype(np.int64) * vocabulary + chosen["token"]
        if kind in (Kind.BIAS, Kind.SOURCE, Kind.DRY):
            arrays[f"{name}_value"] = np.ascontiguousarray(chosen["value"])
        elif kind is Kind.FORCE:
            arrays["force_place"] = rows.astype(np.int64)
    return arrays


def words(table: Table) -> Array:
    """A table in the form that a device reads: [rows, WORDS] int32."""
    return table.view(np.int32).reshape(len(table), WORDS)


def where_true(mask: Array) -> Int32:
    return np.flatnonzero(mask).astype(np.int32)


def trial_batch(vocabulary: int) -> SamplingBatch:
    """A row that draws, a beam row, and a row that is changed and asks for reports: together they use all kernels."""
    edits = np.zeros(2, dtype=EDIT)
    edits["row"], edits["token"], edits["kind"], edits["value"] = 2, (0, vocabulary - 1), Kind.HISTORY, (0.0, 1.0)
    table = neutral_rows(
        3,
        top_p=(0.9, 1.0, 0.9),
        repetition_penalty=(1.0, 1.0, 1.1),
        beam_width=(0, 2, 0),
        num_draws=(1, 0, 1),
        num_logprobs=(-1, -1, 1),
    )
    return SamplingBatch(
        rows=np.arange(3, dtype=np.int32),
        table=table,
        uniforms=np.full((3, 1), 0.5),
        edits=edits,
        masked=np.array([2], dtype=np.int32),
        masks=np.full((1, mask_words(vocabulary)), 2**32 - 1, dtype=np.uint32),
    )
