"""The modules whose queries attend to keys in pages, or beside them."""

from engine.model.latent import LatentAttention
from engine.model.layers import CrossAttention, SelfAttention
from engine.model.reading import ReadingAttention
from engine.model.routed_attention import RoutedAttention
from engine.model.value_scores import ValueScoringAttention

AttentionModule = (
    SelfAttention | CrossAttention | LatentAttention | ReadingAttention | RoutedAttention | ValueScoringAttention
)
