"""The first vectors of a stack: of token ids, of an image's patches, of a sound's spectrum."""

from __future__ import annotations

from dataclasses import dataclass

from engine.interface.outputs import SignalInfo
from engine.model.normalisation import Norm
from engine.model.positions import Positions


@dataclass(frozen=True, slots=True)
class MaskedOut:
    """Tokens of one id have vectors of zeros, and those of an input are scaled by how many it has of these: they are
    multiplied by (1 - usual) / (1 - share), the share of such tokens in training and in the input
    (bioRxiv:2022.07.20.500902)."""

    id: int
    usual: float


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The vectors of the `taps` tokens around each, one after the other, which a matrix with a bias maps to `width`
    features (arXiv:2004.02984); zeros beyond an input's ends."""

    taps: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Token ids to vectors of `width` features.

    Attributes:
        vocab_size, width: shape of the table.
        scale: multiplies the vectors.
        masked_out: what becomes of masks before anything is added.
        neighbours: what vectors are made of before anything is added.
        positions: added after scaling.
        token_types: number of segment embeddings added, 0 for none.
        second_after: where nothing is said of an input's segments, its tokens after the first one of this id are of the
            second; without one, those after its first token. None: all are of the first.
        tasks: rows of a table of tasks. The first row, a checkpoint's default task, is added (arXiv:2107.02137). 0: no
            table.
        boxes: rows of the tables of where on its page a token stands, one for horizontal and one for vertical places
            of its box, and one each for the box's height and width (arXiv:1912.13318); 0 for none.
        token_norm: applied to the vectors before positions and segments are added.
        norm: applied to the sum.
        projection: features that the vectors are mapped to by a matrix without bias, before positions are added.
        expansion: features that the normed sum is mapped to at last, by a matrix with a bias (arXiv:2003.10555).
        projects_sum: the matrix comes after positions and segments, which have `width` features then.
    """

    vocab_size: int
    width: int
    scale: float = 1.0
    masked_out: MaskedOut | None = None
    neighbours: Neighbours | None = None
    positions: Positions | None = None
    token_types: int = 0
    second_after: int | None = None
    tasks: int = 0
    boxes: int = 0
    token_norm: Norm | None = None
    norm: Norm | None = None
    projection: int | None = None
    expansion: int | None = None
    projects_sum: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """An image's patches to vectors of `width` features, row by row, by one matrix over a patch's pixels
    (arXiv:2010.11929). Pixels at the right and at the bottom that fill no whole patch are left out.

    Attributes:
        image, patch: height and width, in pixels.
        channels: of the image.
        bias: the matrix has one.
        first: learned vectors that come before those of the patches: of a class, for example.
        positions: added to all of them.
        order: the row of the table of positions of each patch; None: they are in order.
        norm: applied to the sum.
    """

    image: tuple[int, int]
    patch: tuple[int, int]
    channels: int
    width: int
    bias: bool = True
    first: int = 0
    positions: Positions | None = None
    order: tuple[int, ...] | None = None
    norm: Norm | None = None

    @property
    def signal(self) -> SignalInfo:
        """The signal that it reads, and the number of vectors that it becomes."""
        rows, columns = (pixels // size for pixels, size in zip(self.image, self.patch, strict=True))
        return SignalInfo("image", (self.channels, *self.image), self.first + rows * columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrum:
    """Frames of sound to vectors of `width` features: two convolutions over time with GELU after each, the second of
    which is taken at every `stride`th place (arXiv:2212.04356).

    Attributes:
        bins, frames: of the spectrum.
        kernel: frames that a convolution sees at a time, odd; there are zeros before the first and after the last.
        positions: added to the vectors.
    """

    bins: int
    frames: int
    width: int
    kernel: int = 3
    stride: int = 2
    positions: Positions | None = None

    @property
    def signal(self) -> SignalInfo:
        """The signal that it reads, and the number of vectors that it becomes."""
        return SignalInfo("audio", (self.bins, self.frames), -(-self.frames // self.stride))


Embedding = Tokens | Patches | Spectrum
