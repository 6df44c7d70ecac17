"""The products of a stack that adapters may add to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from engine.model.block_sums import BlockSumAttention
from engine.model.blocks import SequentialBlock, Sublayer
from engine.model.global_stream import StreamAttention
from engine.model.global_tokens import GlobalAttention
from engine.model.layers import EncodedKeys, GatedFeedForward, Linear, SelfAttention, SparseFeedForward
from engine.model.operations import AddAdapters
from engine.model.recurrences import FeatureDeltaLayer, GatedRecurrenceLayer
from engine.model.state_layers import DeltaRuleAttention
from engine.model.value_scores import ValueScoringAttention

if TYPE_CHECKING:
    from engine.model.stack import TransformerStack


def adaptable(*stacks: TransformerStack | None) -> dict[Linear, int]:
    """The products of a model's stacks that adapters may add to, each with the number of checkpoint matrices that it
    may join. An encoder may compute products of the decoder.

    Two kinds are excluded: matrices that also multiply rows other than those of tokens, such as vectors beside the
    tokens or sums of blocks, and matrices without their own operation, such as those of experts.
    """
    existing = [stack for stack in stacks if stack is not None]
    modules = [module for stack in existing for module in stack.modules()]
    elsewhere = {linear for module in modules for linear in _elsewhere(module)}
    joined = dict(pair for module in modules for pair in _joined(module))
    operations = (operation for stack in existing for operation in stack.program.operations)
    products = (operation.linear for operation in operations if isinstance(operation, AddAdapters))
    return {linear: joined.get(linear, 1) for linear in products if linear not in elsewhere}


def _elsewhere(module: nn.Module) -> Iterator[Linear]:
    """The matrices of a module that multiply rows other than its tokens'."""
    match module:
        case BlockSumAttention() | StreamAttention():
            yield from _linears(module)
        case SequentialBlock(attention=Sublayer(inner=StreamAttention()), ffn=Sublayer(inner=network)):
            yield from _linears(network)


def _linears(module: nn.Module) -> Iterator[Linear]:
    return (each for each in module.modules() if isinstance(each, Linear))


def _joined(module: nn.Module) -> Iterator[tuple[Linear, int]]:
    match module:
        case ValueScoringAttention():
            yield module.qkv, 3
        case SelfAttention():
            yield module.qkv, 3
            if isinstance(module, GlobalAttention):
                yield module.global_qkv, 3
        case EncodedKeys():
            yield module.kv, 2
        case GatedFeedForward() | SparseFeedForward():
            yield module.gate_up, 2
        case DeltaRuleAttention():
            yield module.enter, 3
            yield module.rates, 2
        case GatedRecurrenceLayer():
            yield module.enter, 2
        case FeatureDeltaLayer():
            yield module.enter, 3
            yield module.low, 2
