"""The parts that tell a transformer where its tokens stand: in the embedding, or in attention's scores."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.normalisation import Norm


@dataclass(frozen=True, slots=True)
class Learned:
    """A learned vector per position, read at row position + offset of a table of `size` rows.

    Attributes:
        unplaced: tokens of this id have no position: they take row offset - 1, and those after them do not count
            them (RoBERTa's padding, wherever it stands); None: all have one.
    """

    size: int
    offset: int = 0
    unplaced: int | None = None


@dataclass(frozen=True, slots=True)
class Sinusoidal:
    """Fixed sine and cosine vectors (arXiv:1706.03762, 3.5), read as `Learned` ones are.

    A checkpoint that stores its table is used as it is stored; one without means the vectors of the formula.
    """

    size: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class SpannedSinusoidal:
    """Sine and cosine vectors whose waves are spread from 2 pi to 10000 times that, both ends included (tensor2tensor,
    fairseq); those of `Sinusoidal` stay below the upper end. Read as `Learned` ones are, made by the formula.

    Attributes:
        unplaced: tokens of this id have a vector of zeros, the row offset - 1. In an encoder, later tokens do not count
            them. A decoder, whose tokens come one by one, counts all.
    """

    size: int
    offset: int = 0
    unplaced: int | None = None


Positions = Learned | Sinusoidal | SpannedSinusoidal


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Rotary frequencies divided by `factor` (position interpolation, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class ShareScaling:
    """Rotary frequencies as those of a whole head, divided by `factor`; only the first `turning` pairs of features turn
    (Gemma 4)."""

    turning: int
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class BandScaling:
    """Rotary frequencies divided by `factor` below a band, kept above it, blended inside it (Llama 3.1).

    Attributes:
        factor: divisor of the low frequencies.
        low, high: the band lies between wavelengths original_length / low and original_length / high.
        original_length: tokens of context in pretraining.
    """

    factor: float
    low: float
    high: float
    original_length: int


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """A larger theta where the longest sequence exceeds `original_length` ("dynamic NTK").

    Attributes:
        factor: how far the context is stretched.
        original_length: tokens of context in pretraining.
    """

    factor: float
    original_length: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Low frequencies divided by `factor`, high ones kept, a ramp between them (YaRN, arXiv:2309.00071).

    Attributes:
        factor: divisor of the low frequencies.
        fast, slow: the ramp lies between the features that turn so often over original_length tokens.
        original_length: tokens of context in pretraining.
        attention_factor: multiplies the rotated features.
        truncate: the ramp begins and ends at whole features.
    """

    factor: float
    fast: float
    slow: float
    original_length: int
    attention_factor: float
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LongScaling:
    """A divisor per frequency, of two sets: one for short and one for long sequences (arXiv:2402.13753).

    Attributes:
        short, long: [dim / 2] divisors; long ones where the longest sequence exceeds original_length.
        original_length: tokens of context in pretraining.
        attention_factor: multiplies the rotated features.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_length: int
    attention_factor: float


Scaling = LinearScaling | ShareScaling | BandScaling | DynamicScaling | YarnScaling | LongScaling


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding (arXiv:2104.09864) of the first `dim` features of each head.

    Attributes:
        dim: rotated features, even.
        theta: base of the geometric row of frequencies.
        interleaved: pairs are neighbouring features; otherwise feature i pairs with i + dim / 2.
        scaling: how the frequencies are stretched for long contexts. Whatever of it depends on the length of a
            sequence is chosen once for a request, by the length that it can reach: see `limit`.
        in_float32: queries and keys are rotated in float32 and rounded afterwards, not in their own format.
    """

    dim: int
    theta: float
    interleaved: bool = False
    scaling: Scaling | None = None
    in_float32: bool = False

    @property
    def limit(self) -> int | None:
        """Most tokens of a sequence that is turned as in pretraining, where longer ones are turned otherwise; None
        where length does not matter."""
        return self.scaling.original_length if isinstance(self.scaling, DynamicScaling | LongScaling) else None


@dataclass(frozen=True, slots=True)
class RelativeBuckets:
    """Learned bias per head by bucketed distance (T5, arXiv:1910.10683, 2.1)."""

    buckets: int
    max_distance: int
    bidirectional: bool


@dataclass(frozen=True, slots=True)
class QueryBuckets:
    """For each bucket of distances a number per head that a layer makes of a query's hidden state, added to the query's
    scores (ProphetNet, arXiv:2001.04063). Buckets are of earlier tokens, as in `RelativeBuckets`."""

    buckets: int
    max_distance: int


@dataclass(frozen=True, slots=True)
class Slopes:
    """Fixed bias per head, linear in the distance (ALiBi, arXiv:2108.12409)."""

    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TwoSidedSlopes:
    """Fixed bias per head, linear in the distance on either side (ALiBi of an encoder, arXiv:2310.19923)."""

    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RoundedSlopes:
    """Fixed bias per head, linear in the key's own position: ALiBi that was trained in bfloat16.

    softmax takes no notice of what is added to all keys alike, so without rounding this would equal `Slopes`. Each
    product of slope and position is rounded to bfloat16, and multiplied by `scale` afterwards.
    """

    values: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Disentangled:
    """Scores of what stands there with its distance, beside those of both contents (DeBERTa, arXiv:2006.03654, 3.1).

    The vectors of distances are the stack's (`DistanceVectors`); each layer projects them to keys and queries of its
    own. All three terms are multiplied by the attention's scale.

    Attributes:
        content_to_position: queries are multiplied with the keys of distances.
        position_to_content: keys are multiplied with the queries of distances.
        shared: distances are projected by the matrices that project tokens; otherwise by two more.
    """

    content_to_position: bool = True
    position_to_content: bool = True
    shared: bool = False


@dataclass(frozen=True, slots=True)
class DistanceVectors:
    """A learned vector for each bucket of distances, for the disentangled attention of a stack's layers.

    Attributes:
        max_distance: the last distance, in tokens; where there are buckets, the last of them begins about there.
        buckets: how many there are on either side: the nearer half hold one distance each, the others widen
            geometrically. None: each distance has its own vector.
        norm: of the vectors.
    """

    max_distance: int
    buckets: int | None = None
    norm: Norm | None = None

    @property
    def span(self) -> int:
        """Vectors on either side of distance 0."""
        return self.buckets or self.max_distance


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries at position p are multiplied by 1 + growth * log(1 + floor((p + first) / every)): softmax gets no flatter
    where there are more keys (arXiv:2501.19399).

    Attributes:
        first: the number of the first position, 0 or 1.
    """

    growth: float
    every: float
    first: int = 1


AttentionPosition = Rotary | RelativeBuckets | QueryBuckets | Slopes | TwoSidedSlopes | RoundedSlopes | Disentangled
