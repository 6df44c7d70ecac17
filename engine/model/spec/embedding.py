"""The first vectors of a stack: from token ids, an image, or a sound's spectrum."""

from __future__ import annotations

from dataclasses import dataclass

from engine.interface.outputs import SignalInfo
from engine.model.normalisation import Norm
from engine.model.positions import Positions
from engine.model.spec.networks import Activation


@dataclass(frozen=True, slots=True)
class MaskedOut:
    """Tokens with one id have vectors of zeros, and the vectors of an input are scaled by their number: they are
    multiplied by (1 - usual) / (1 - share), the share of such tokens in training and in the input
    (bioRxiv:2022.07.20.500902)."""

    id: int
    usual: float


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The vectors of the `taps` tokens around each token, one after the other, which a matrix with a bias maps to
    `width` features (arXiv:2004.02984); zeros beyond an input's ends."""

    taps: int
    width: int


@dataclass(frozen=True, slots=True)
class Joined:
    """The vector of a token is a matrix times [norm(its vector), norm(hidden)], where hidden is the hidden state of
    another model at the token before (multi-token prediction, arXiv:2412.19437, 2.2). With an entrance, it is that
    hidden state alone, and a layer reads the norm of the token's vector (`Block.reads_tokens`)."""

    norm: Norm
    # Features of hidden states that a matrix maps to those of the stream, before they are given; 0: there is no matrix.
    entrance: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Turns token ids into vectors with `width` features.

    Attributes:
        vocab_size, width: shape of the table.
        rows: the rows of the table that this rank has, if ranks divide the model; None: all.
        scale: multiplies the vectors.
        apart: a token whose vector is a parameter of its own, which is not scaled.
        masked_out: the treatment of masks before anything is added.
        neighbours: how vectors are combined before anything is added.
        positions: positions, added after scaling.
        token_types: number of segment embeddings, 0 for none.
        second_after: default segments: tokens after the first one with this id are in the second segment (or, without
            such a token, all after the first token). None: all are in the first.
        tasks: rows of a table of tasks. The first row, a checkpoint's default task, is added (arXiv:2107.02137). 0: no
            table.
        boxes: rows of the tables for a token's box on its page: one table for horizontal and one for vertical
            positions, and one each for height and width (arXiv:1912.13318); 0 for none.
        token_norm: applied to the vectors before positions and segments are added.
        norm: applied to the sum.
        projection: features to which a matrix without bias maps the vectors before positions are added.
        expansion: features to which a matrix with a bias maps the normalised sum at the end (arXiv:2003.10555).
        projects_sum: whether the matrix comes after positions and segments, which then have `width` features.
        joined: how another model's hidden states are joined with the vectors.
        image: makes the vectors of an image, which replace the first ones of each input before positions are added.
    """

    vocab_size: int
    width: int
    scale: float = 1.0
    apart: int | None = None
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
    joined: Joined | None = None
    image: DualPyramid | None = None
    rows: tuple[int, int] | None = None

    @property
    def signal(self) -> SignalInfo | None:
        """The image at an input's beginning, if there is one."""
        return None if self.image is None else self.image.signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """Turns an image's patches into vectors with `width` features, row by row, with one matrix over a patch's pixels
    (arXiv:2010.11929). Pixels at the right and the bottom that do not fill a patch are left out.

    Attributes:
        image, patch: height and width, in pixels. An `image` of (0, 0) may have any size; it comes as the pixels of its
            patches (`engine.model.grids`), whose positions are blends of those of a square.
        channels: channels of the image.
        frames: the number of times that an image is repeated in an input of the matrix.
        bias: whether the matrix has a bias.
        first: learned vectors before those of the patches, such as a class token.
        positions: positions added to all of them.
        cells: where positions are blends, the cells of the table are stretched to the image, not their centres.
        order: the row of the table of positions of each patch; None: they are in order.
        norm: a norm of the sum.
    """

    image: tuple[int, int]
    patch: tuple[int, int]
    channels: int
    width: int
    frames: int = 1
    bias: bool = True
    first: int = 0
    positions: Positions | None = None
    cells: bool = False
    order: tuple[int, ...] | None = None
    norm: Norm | None = None

    @property
    def signal(self) -> SignalInfo:
        """Its input signal, and the number of vectors that the signal becomes."""
        rows, columns = (pixels // size for pixels, size in zip(self.image, self.patch, strict=True))
        return SignalInfo("image", (self.channels, *self.image), self.first + rows * columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrum:
    """Turns frames of sound into vectors with `width` features: two convolutions over time with GELU after each, the
    second with a stride of `stride` (arXiv:2212.04356).

    Attributes:
        bins, frames: sizes of the spectrum.
        kernel: frames in a convolution's window, odd; zeros precede the first frame and follow the last.
        positions: positions added to the vectors.
    """

    bins: int
    frames: int
    width: int
    kernel: int = 3
    stride: int = 2
    positions: Positions | None = None

    @property
    def signal(self) -> SignalInfo:
        """Its input signal, and the number of vectors that the signal becomes."""
        return SignalInfo("audio", (self.bins, self.frames), -(-self.frames // self.stride))


@dataclass(frozen=True, slots=True)
class PyramidStage:
    """`layers` over vectors of `width` features. `inner`: features of their networks."""

    width: int
    layers: int
    heads: int
    inner: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pyramid:
    """The whole encoder of an image, in stages of layers with attention within windows (Swin, arXiv:2103.14030). Each
    stage has a quarter of the positions of the stage before.

    Attributes:
        image, patch: height and width, in pixels.
        channels: channels of the image.
        window: positions of a window's side.
        norm: of the patches, and of each sublayer's input.
    """

    image: tuple[int, int]
    patch: tuple[int, int]
    channels: int
    window: int
    stages: tuple[PyramidStage, ...]
    norm: Norm
    activation: Activation
    qkv_bias: bool = True
    positions: Positions | None = None

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the positions of each stage."""
        rows, columns = (pixels // size for pixels, size in zip(self.image, self.patch, strict=True))
        found = [(rows, columns)]
        for _ in self.stages[1:]:
            rows, columns = -(-rows // 2), -(-columns // 2)
            found.append((rows, columns))
        return tuple(found)

    @property
    def signal(self) -> SignalInfo:
        """Its input signal, and the number of vectors that the signal becomes."""
        rows, columns = self.grids[-1]
        return SignalInfo("image", (self.channels, *self.image), rows * columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class DualStage:
    """`layers` pairs of layers over vectors of `width` features, which a convolution makes from those of the stage
    before.

    Attributes:
        heads: of attention within windows.
        groups: of features that attend to each other.
        inner: features of the networks.
        kernel, stride, padding: of the convolution.
        norm_first: the norm is of the convolution's input, otherwise of its result.
    """

    width: int
    layers: int
    heads: int
    groups: int
    inner: int
    kernel: int
    stride: int
    padding: int
    norm_first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DualPyramid:
    """Vectors of an image for an encoder of texts. In each pair of layers, positions attend within windows, then
    features within groups (DaViT, arXiv:2204.03645). The last stage's vectors and their mean, which comes first, are
    projected and normalised (arXiv:2311.06242).

    Attributes:
        image: height and width, in pixels.
        channels: channels of the image.
        window: positions of a window's side.
        norm: of convolutions, of each sublayer's input, and of the result.
        places: rows of the tables of positions in a row and in a column.
        times: rows of the table of positions in time, of which an image has the first.
        projection: features of the result.
    """

    image: tuple[int, int]
    channels: int
    window: int
    stages: tuple[DualStage, ...]
    norm: Norm
    activation: Activation
    places: int
    times: int
    projection: int
    qkv_bias: bool = True

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the positions of each stage."""
        (rows, columns), found = self.image, []
        for stage in self.stages:
            rows, columns = ((size + 2 * stage.padding - stage.kernel) // stage.stride + 1 for size in (rows, columns))
            found.append((rows, columns))
        return tuple(found)

    @property
    def signal(self) -> SignalInfo:
        """Its input signal, and the number of vectors that the signal becomes."""
        rows, columns = self.grids[-1]
        return SignalInfo("image", (self.channels, *self.image), 1 + rows * columns, texts=True)


Embedding = Tokens | Patches | Spectrum | Pyramid
