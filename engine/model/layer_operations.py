"""The operations of layers that read more than one stream: separate vectors, and several versions of the stream."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from engine.backends.native.program import Rows
from engine.model import spec
from engine.model.embedding import TokenVectors
from engine.model.layer_vectors import LayerEmbedding
from engine.model.operations import HasRows
from engine.model.versions import LayerVersions, VersionEnds


@dataclass(frozen=True, slots=True, eq=False)
class EmbedLayers(HasRows):
    """out = each layer's vectors of the tokens, whose embedding is x."""

    READS = ("x",)
    WRITES = ("out",)
    module: LayerEmbedding | TokenVectors
    x: Rows
    out: tuple[Rows, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MultiplyAll(HasRows):
    """x = x * factor, a learned number or a constant."""

    READS = ("x",)
    WRITES = ("x",)
    factor: nn.Parameter | float
    x: Rows


@dataclass(frozen=True, slots=True, eq=False)
class Keep(HasRows):
    """Append x to the pass's `kept`."""

    READS = ("x",)
    x: Rows


@dataclass(frozen=True, slots=True, eq=False)
class AddImages(HasRows):
    """x = x + a vector of an image for each token that has some; `number`: which of a token's vectors."""

    READS = ("x",)
    WRITES = ("x",)
    x: Rows
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class ActivateSparsely(HasRows):
    """out = function(relu(a - m - cutoff * s)) * b of x = [a | b], m and s being a row's mean and deviation."""

    READS = ("x",)
    WRITES = ("out",)
    function: spec.Activation
    cutoff: float
    x: Rows
    out: Rows


@dataclass(frozen=True, slots=True, eq=False)
class ExpandVersions(HasRows):
    """versions = the initial versions, computed from the stream's embedding x."""

    READS = ("x",)
    WRITES = ("versions",)
    module: VersionEnds
    x: Rows
    versions: Rows


@dataclass(frozen=True, slots=True, eq=False)
class PredictVersions(HasRows):
    """versions = a layer's predictions of them; out = the active one."""

    READS = ("versions",)
    WRITES = ("versions", "out")
    module: LayerVersions
    versions: Rows
    out: Rows


@dataclass(frozen=True, slots=True, eq=False)
class CorrectVersions(HasRows):
    """versions = predictions, corrected by the layer's result x; out = what is read from the active one beside it."""

    READS = ("versions", "x")
    WRITES = ("versions", "out")
    module: LayerVersions
    versions: Rows
    x: Rows
    out: Rows


@dataclass(frozen=True, slots=True, eq=False)
class AddToVersions(HasRows):
    """versions = versions + x, except for the first."""

    READS = ("versions", "x")
    WRITES = ("versions",)
    module: LayerVersions
    versions: Rows
    x: Rows


@dataclass(frozen=True, slots=True, eq=False)
class MergeVersions(HasRows):
    """out = the one stream that the versions become at the end."""

    READS = ("versions",)
    WRITES = ("out",)
    module: VersionEnds
    versions: Rows
    out: Rows
