"""The parts that give a transformer the positions of its tokens: in the embedding, or in attention's scores."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.normalisation import Norm


@dataclass(frozen=True, slots=True)
class Learned:
    """A learned vector per position, read at row position + offset of a table of `size` rows."""

    size: int
    offset: int = 0
    # tokens with this id have no position: they use row offset - 1, and later tokens do not count them (RoBERTa's
    # padding, wherever it is); None: all have one
    unplaced: int | None = None


@dataclass(frozen=True, slots=True)
class Sinusoidal:
    """Fixed sine and cosine vectors (arXiv:1706.03762, 3.5), read like those of `Learned`.

    A table that the checkpoint stores is used unchanged; without one, the formula gives the vectors.
    """

    size: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class SpannedSinusoidal:
    """Sine and cosine vectors whose wavelengths range from 2 pi to 10000 times that, both ends included (tensor2tensor,
    fairseq); those of `Sinusoidal` stay below the upper end. Read like those of `Learned`, and made by the formula."""

    size: int
    offset: int = 0
    # tokens with this id have a vector of zeros, the row offset - 1. In an encoder, later tokens do not count them. A
    # decoder, whose tokens come one by one, counts all.
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
    """Rotary frequencies divided by `factor` below a band, kept above it, blended inside it (Llama 3.1)."""

    factor: float  # divisor of the low frequencies
    low: float
    high: float
    original_length: int  # context length in pretraining


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """A larger theta if the longest sequence exceeds `original_length` ("dynamic NTK")."""

    factor: float  # the stretching of the context
    original_length: int  # context length in pretraining


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Low frequencies divided by `factor`, high ones kept, a ramp between them (YaRN, arXiv:2309.00071)."""

    factor: float  # divisor of the low frequencies
    # fast, slow: the ramp is between the features that rotate this many times over original_length tokens
    fast: float
    slow: float
    original_length: int  # context length in pretraining
    attention_factor: float  # multiplies the rotated features
    truncate: bool = True  # whether the ramp begins and ends at whole features


@dataclass(frozen=True, slots=True)
class LongScaling:
    """A divisor per frequency, from two sets: one for short and one for long sequences (arXiv:2402.13753)."""

    # short, long: [dim / 2] divisors; the long ones apply if the longest sequence exceeds original_length
    short: tuple[float, ...]
    long: tuple[float, ...]
    original_length: int  # context length in pretraining
    attention_factor: float  # multiplies the rotated features


Scaling = LinearScaling | ShareScaling | BandScaling | DynamicScaling | YarnScaling | LongScaling


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding (arXiv:2104.09864) of the first `dim` features of each head."""

    dim: int  # rotated features, even
    theta: float  # base of the geometric series of frequencies
    interleaved: bool = False  # whether pairs are adjacent features; otherwise feature i pairs with i + dim / 2
    # the scaling of the frequencies for long contexts. If it depends on the length of a sequence, it is chosen once per
    # request by the length that the request can reach: see `limit`.
    scaling: Scaling | None = None
    # whether queries and keys are rotated in float32 and rounded afterwards, not in their own format
    in_float32: bool = False
    # for each pair of features, the axis of a position that turns it and the number of its frequency, for positions
    # with several axes (arXiv:2409.12191); (): positions have one axis
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def limit(self) -> int | None:
        """Maximum length of a sequence that is rotated as in pretraining; None if length does not matter."""
        return self.scaling.original_length if isinstance(self.scaling, DynamicScaling | LongScaling) else None


@dataclass(frozen=True, slots=True)
class RelativeBuckets:
    """Learned bias per head by bucketed distance (T5, arXiv:1910.10683, 2.1)."""

    buckets: int
    max_distance: int
    bidirectional: bool


@dataclass(frozen=True, slots=True)
class QueryBuckets:
    """For each bucket of distances, a number per head that a layer computes from a query's hidden state and adds to the
    query's scores (ProphetNet, arXiv:2001.04063). Buckets cover earlier tokens, as in `RelativeBuckets`."""

    buckets: int
    max_distance: int


@dataclass(frozen=True, slots=True)
class Slopes:
    """Fixed bias per head, linear in the distance (ALiBi, arXiv:2108.12409)."""

    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TwoSidedSlopes:
    """Fixed bias per head, linear in the distance on either side (ALiBi for an encoder, arXiv:2310.19923)."""

    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RoundedSlopes:
    """Fixed bias per head, linear in the key's own position: ALiBi as trained in bfloat16.

    softmax ignores a number that is added to all keys alike, so without rounding this would equal `Slopes`. Each
    product of slope and position is rounded to bfloat16, and then multiplied by `scale`.
    """

    values: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Disentangled:
    """Scores between content and distance, in addition to those between contents (DeBERTa, arXiv:2006.03654, 3.1).

    The vectors of distances belong to the stack (`DistanceVectors`); each layer projects them to its own keys and
    queries. All three terms are multiplied by the attention's scale.
    """

    content_to_position: bool = True  # whether queries are multiplied with the keys of distances
    position_to_content: bool = True  # whether keys are multiplied with the queries of distances
    # whether the matrices that project tokens also project distances; otherwise there are two more
    shared: bool = False


@dataclass(frozen=True, slots=True)
class DistanceVectors:
    """A learned vector for each bucket of distances, for the disentangled attention of a stack's layers."""

    max_distance: int  # the last distance, in tokens; with buckets, the last one begins about there
    # the number on either side: the nearer half have one distance each, the others widen geometrically. None: each
    # distance has its own vector.
    buckets: int | None = None
    norm: Norm | None = None

    @property
    def span(self) -> int:
        """Vectors on either side of distance 0."""
        return self.buckets or self.max_distance


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries at position p are multiplied by 1 + growth * log(1 + floor((p + first) / every)), so that softmax does
    not flatten as the number of keys grows (arXiv:2501.19399). `first`: the number of the first position, 0 or 1."""

    growth: float
    every: float
    first: int = 1


AttentionPosition = Rotary | RelativeBuckets | QueryBuckets | Slopes | TwoSidedSlopes | RoundedSlopes | Disentangled
