"""The parts that make vectors of images for a decoder, which stand in the places of some of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from engine.interface.vision import ImageTokens
from engine.model.normalisation import Norm
from engine.model.spec.networks import Activation, Gated
from engine.model.spec.stack import Stack


@dataclass(frozen=True, slots=True)
class Projector:
    """Two matrices with an activation between them, from the tower's features to those of the decoder.

    Attributes:
        bias: both matrices have one.
        merge: the features of this many hidden states, one after the other, are the input.
        inner: features between the matrices; None: those of the decoder.
        norm: of the input.
        each: the norm is of each hidden state, before they are put together.
        merged: a matrix without bias maps the `merge` hidden states to the features of one before all that.
        shuffles: the hidden states are those of a grid, whose squares of `merge` patches are put together first.
    """

    activation: Activation
    bias: bool = True
    merge: int = 1
    inner: int | None = None
    norm: Norm | None = None
    each: bool = False
    merged: bool = False
    shuffles: bool = False


@dataclass(frozen=True, slots=True)
class GatedProjector:
    """A matrix with a bias makes a vector of the decoder's features from `merge` hidden states. A matrix, a norm and
    GELU follow, and a gated network without biases (arXiv:2507.01006)."""

    merge: int
    norm: Norm
    network: Gated


@dataclass(frozen=True, slots=True)
class Shuffled:
    """A projector that concatenates the hidden states of `factor` x `factor` patches and maps them by one matrix to a
    vector of the decoder (arXiv:2408.12637). `bias`: the matrix has one."""

    factor: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Pooled:
    """The means of the hidden states of squares of patches, normed, and mapped by one matrix without bias
    (arXiv:2503.19786).

    Attributes:
        factor: patches of a square's side.
    """

    factor: int
    norm: Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision(ImageTokens):
    """A tower over crops of images, and the projector from its hidden states to a decoder's vectors (arXiv:2304.08485).

    Attributes:
        tower: an encoder of images without a head.
        skip: number of a crop's first hidden states that are left out.
        projector: makes the decoder's vectors.
        squares: an image keeps its shape, and each square of this many patches a side becomes a vector
            (`engine.model.grids`); 0: the tower reads crops of one size.
        window: squares of a window's side, for attention `in_parts`; 0: an image is one window.
        deep: makes further vectors from each of the tower's `kept` hidden states. The decoder's first layers, one after
            the other, add them to the tokens' hidden states (arXiv:2406.04334).
        joined: the projector reads the tower's `kept` hidden states, in order, and the last ones, concatenated.
        scale: multiplies the decoder's vectors.
    """

    tower: Stack
    skip: int
    projector: Projector | GatedProjector | Shuffled | Pooled
    squares: int = 0
    window: int = 0
    deep: Projector | None = None
    joined: bool = False
    scale: float = 1.0
