"""The parts that a transformer is made of, as frozen values.

A family is a composition of these parts and nothing else; `engine.model.transformer` builds modules
from them. A choice between alternatives is a sum type (`Placement`, `FeedForward` …), so a new alternative is a new
member, not another boolean. Sizes are in features or tokens, as their names say.
"""

from engine.model.spec.attention import (
    NO_ATTENTION,
    AfterRotation,
    Attention,
    EachHead,
    Fourier,
    Latent,
    OutputGate,
    PerHead,
    QkNorm,
    RoutedHeads,
    Sinks,
    Spans,
    ValueScores,
    WholeProjection,
)
from engine.model.spec.blocks import (
    AfterSublayer,
    Block,
    Bottleneck,
    Convolution,
    LayerInput,
    LowRank,
    NormedResidual,
    Parallel,
    Placement,
    Post,
    Pre,
    Sandwich,
)
from engine.model.spec.embedding import (
    DualPyramid,
    DualStage,
    Embedding,
    Joined,
    MaskedOut,
    Neighbours,
    Patches,
    Pyramid,
    PyramidStage,
    Spectrum,
    Tokens,
)
from engine.model.spec.heads import (
    AnswerSpan,
    AtToken,
    Classifier,
    Embedder,
    FirstStates,
    Head,
    HeadLayer,
    LabelledSpans,
    Lm,
    MaskedLm,
    Pool,
    Probe,
    ResidualNetwork,
)
from engine.model.spec.model import ModelSpec
from engine.model.spec.networks import (
    NO_NETWORK,
    Activation,
    Clamped,
    Corrected,
    Dense,
    Experts,
    FeedForward,
    Gated,
    GroupLimited,
    Likeliest,
    NormedSum,
    Opened,
    Rescaled,
    Routing,
    ScaledInput,
    Shared,
    SparselyGated,
    SparseMixer,
    Xielu,
)
from engine.model.spec.sparse import (
    BeforeToken,
    BlockSums,
    FirstToken,
    GlobalStream,
    GlobalTokens,
    Sparse,
    SparseBlocks,
)
from engine.model.spec.stack import LayerVectors, PredictingStream, Repeated, Stack, Versions
from engine.model.spec.states import (
    ChannelScan,
    DeltaRule,
    FadingAttention,
    FeatureDelta,
    GatedRecurrence,
    SelectiveScan,
    ShortConvolution,
    StateLayer,
)
from engine.model.spec.vision import GatedProjector, Pooled, Projector, Shuffled, Vision

__all__ = [
    "NO_ATTENTION", "NO_NETWORK",
    "Activation", "AfterRotation", "AfterSublayer", "AnswerSpan", "AtToken", "Attention", "BeforeToken",
    "Block", "BlockSums", "Bottleneck", "ChannelScan", "Clamped", "Classifier", "Convolution", "Corrected", "DeltaRule",
    "Dense", "DualPyramid", "DualStage", "EachHead", "Embedder", "Embedding", "Experts", "FadingAttention",
    "FeatureDelta", "FeedForward",
    "FirstStates", "FirstToken", "Fourier", "Gated", "GatedProjector", "GatedRecurrence", "GlobalStream",
    "GlobalTokens", "GroupLimited", "Head", "HeadLayer", "Joined", "LabelledSpans", "Latent", "LayerInput",
    "LayerVectors", "Likeliest", "Lm", "LowRank", "MaskedLm", "MaskedOut", "ModelSpec", "Neighbours", "NormedResidual",
    "NormedSum", "Opened", "OutputGate", "Parallel", "Patches", "PerHead", "Placement", "Pool", "Pooled", "Post", "Pre",
    "PredictingStream", "Probe", "Projector", "Pyramid", "PyramidStage",
    "QkNorm", "Repeated", "Rescaled", "ResidualNetwork", "RoutedHeads", "Routing",
    "Sandwich", "ScaledInput", "SelectiveScan",
    "Shared", "ShortConvolution", "Shuffled", "Sinks", "Spans", "Sparse", "SparseBlocks",
    "SparseMixer", "SparselyGated", "Spectrum", "Stack", "StateLayer", "Tokens", "ValueScores", "Versions", "Vision",
    "WholeProjection", "Xielu",
]  # fmt: skip
