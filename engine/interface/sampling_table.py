"""The sampling table: the numbers that control how a step's rows are sampled, declared once.

A step samples S rows. Three inputs control this: a table [S] with a named column for each number (`TABLE`), a sparse
list of edits of single logits (`EDIT`), and dense masks of the allowed tokens. `COLUMNS` determines the fields of a
request, their checks and defaults, the fields of HTTP bodies, and where kernels find the numbers.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.interface.values import NumberRange

# Records of `TABLE` and of `EDIT`.
Table = NDArray[np.void]
EditList = NDArray[np.void]
Masks = NDArray[np.uint32]
MaskRow = NDArray[np.uint32]

Use = Literal["filter", "condition", "penalty", "search", "draw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A number for each sampled row."""

    name: str  # the name of the column and of the request's field
    kind: type[np.generic]
    neutral: float  # the value without effect, which is used if neither request nor model sets one
    # filter: selects the tokens to sample from, in rows that sample; condition: a parameter of a filter, without effect
    # alone; penalty: on tokens that occurred; search, draw: the wanted results of a row and its random numbers, which
    # requests do not set directly
    use: Use
    allowed: NumberRange | None = None  # the range of a request's values; None if requests do not set it
    nothing: tuple[float, ...] = ()  # for a filter, a value that requests for beams, which do not sample, may send


COLUMNS = (
    # The seed's 64 bits; the index of the answer for the first draw, and the token's position in it.
    Column(name="seed", kind=np.int64, neutral=0, use="draw"),
    Column(name="choice", kind=np.int32, neutral=0, use="draw"),
    Column(name="position", kind=np.int32, neutral=0, use="draw"),
    # Tokens to draw: n at a request's first sample, else 1; 0 for beams; less for unused rows.
    Column(name="num_draws", kind=np.int32, neutral=1, use="draw"),
    # Candidates of a beam, 0 for rows that sample; whether a beam's scores are normalised to log-probabilities after
    # all edits.
    Column(name="beam_width", kind=np.int32, neutral=0, use="search"),
    Column(name="renormalize", kind=np.int32, neutral=0, use="search"),
    # Most probable tokens to report, -1 for none.
    Column(name="num_logprobs", kind=np.int32, neutral=-1, use="search"),
    # 0 is greedy.
    Column(name="temperature", kind=np.float32, neutral=1.0, use="filter", allowed=NumberRange(low=0.0), nothing=(0,)),
    # 0 keeps all.
    Column(
        name="top_k",
        kind=np.int32,
        neutral=0,
        use="filter",
        allowed=NumberRange(low=-1, integer=True),
        nothing=(0, -1),
    ),
    Column(
        name="top_p",
        kind=np.float32,
        neutral=1.0,
        use="filter",
        allowed=NumberRange(low=0.0, open_low=True, high=1.0),
        nothing=(1,),
    ),
    Column(
        name="min_p", kind=np.float32, neutral=0.0, use="filter", allowed=NumberRange(low=0.0, high=1.0), nothing=(0,)
    ),
    # 0 or less keeps all.
    Column(
        name="top_n_sigma", kind=np.float32, neutral=0.0, use="filter", allowed=NumberRange(low=-1.0), nothing=(0, -1)
    ),
    Column(
        name="typical_p",
        kind=np.float32,
        neutral=1.0,
        use="filter",
        allowed=NumberRange(low=0.0, open_low=True, high=1.0),
        nothing=(1,),
    ),
    Column(
        name="xtc_probability",
        kind=np.float32,
        neutral=0.0,
        use="filter",
        allowed=NumberRange(low=0.0, high=1.0),
        nothing=(0,),
    ),
    Column(name="xtc_threshold", kind=np.float32, neutral=0.1, use="condition", allowed=NumberRange(low=0.0, high=1.0)),
    Column(
        name="repetition_penalty",
        kind=np.float32,
        neutral=1.0,
        use="penalty",
        allowed=NumberRange(low=0.0, open_low=True),
    ),
    Column(
        name="presence_penalty",
        kind=np.float32,
        neutral=0.0,
        use="penalty",
        allowed=NumberRange(low=-2.0, high=2.0, optional=False),
    ),
    Column(
        name="frequency_penalty",
        kind=np.float32,
        neutral=0.0,
        use="penalty",
        allowed=NumberRange(low=-2.0, high=2.0, optional=False),
    ),
)
# The columns that requests set.
REQUESTED: dict[str, Column] = {column.name: column for column in COLUMNS if column.allowed is not None}
FILTERS = tuple(column for column in COLUMNS if column.use == "filter")

# A whole number of 4-byte words per row; the seed has two.
TABLE = np.dtype([(column.name, column.kind) for column in COLUMNS], align=True)
WORDS = TABLE.itemsize // 4


class Kind(IntEnum):
    """The effect of an edit on a token's logit (for a beam: its log-probability), in the order in which edits are
    applied."""

    BIAS = 0  # `value` is added
    # the token becomes more probable by the factor `value`, the reciprocal of a penalty; at most once per row
    SOURCE = 1
    # the token occurred, so the row's penalties apply once per occurrence; `value` is 1 for occurrences in the output
    HISTORY = 2
    DRY = 3  # the token would continue a repetition: `value` is subtracted; at most once per token of a row
    BAN = 4
    FORCE = 5  # only these tokens of the row are possible, all equally, whatever a mask says


# Below this temperature, a softmax in float32 is one-hot for any two different logits.
GREEDY_TEMPERATURE = 1e-5

# In the order of the rows. Tokens outside the vocabulary, which an encoder with its own vocabulary may have, do not
# count.
EDIT = np.dtype([("row", np.int32), ("token", np.int32), ("kind", np.int32), ("value", np.float32)])
NO_EDITS: EditList = np.zeros(0, dtype=EDIT)
NO_MASKS: Masks = np.zeros((0, 0), dtype=np.uint32)

new_version: Callable[[], int] = itertools.count((os.getpid() << 32) + 1).__next__
"""A number that no table, list of edits or plan had before in any running process of this machine, because plans are
sent between processes."""


def word(name: str) -> int:
    """The index of the word in its row at which a column begins."""
    fields: Any = TABLE.fields
    place: int = fields[name][1] // 4
    return place


def neutral_rows(count: int, **columns: Any) -> Table:
    """A table with that many rows: columns as given, by one value or one per row; the others are neutral."""
    table = np.zeros(count, dtype=TABLE)
    for column in COLUMNS:
        table[column.name] = columns.pop(column.name, column.neutral)
    if columns:
        raise ValueError(f"the sampling table has no column {', '.join(columns)}")
    return table


def by_torch(table: Table) -> NDArray[np.bool_]:
    """[S] rows that sample with a filter that only torch's sampler supports
    (`engine.backends.torch.sampling_whole`)."""
    asked = (table["top_n_sigma"] > 0) | (table["typical_p"] < 1) | (table["xtc_probability"] > 0)
    found: NDArray[np.bool_] = asked & (table["beam_width"] == 0) & (table["temperature"] >= GREEDY_TEMPERATURE)
    return found


def mask_words(vocabulary: int) -> int:
    """Words of a mask's row: one bit per token; token t is bit t % 32 of word t // 32."""
    return -(-vocabulary // 32)
