"""The one transformer: modules composed from a `ModelSpec`.

Nothing here knows a family. A part that has no module yet is named by `unsupported`, which the loader
asks before it reads any weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention.base import AttentionBackend, AttentionMetadata, Paged
from engine.errors import ConfigError, UnsupportedModelError
from engine.model import spec
from engine.model.layers import (
    ACTIVATIONS,
    DenseFeedForward,
    GatedFeedForward,
    Linear,
    Place,
    RotaryTable,
    SelfAttention,
    Step,
    build_norm,
)


def unsupported(model: spec.ModelSpec) -> list[str]:
    """What of the model has no implementation, one line a part; empty if all of it can be served."""
    missing: list[str] = []
    if model.encoder is not None:
        missing.append("encoder stacks")
    if model.decoder is None:
        missing.append("models without a decoder")
    if not isinstance(model.head, spec.Lm):
        missing.append(f"{type(model.head).__name__} heads")
    for stack in (model.encoder, model.decoder):
        if stack is not None:
            missing.extend(_unsupported_embedding(stack.embedding))
            if stack.shared_bias is not None:
                missing.append(f"{type(stack.shared_bias).__name__} shared by all layers")
            for block in stack.blocks:
                missing.extend(_unsupported_block(block))
    return list(dict.fromkeys(missing))


def _unsupported_embedding(part: spec.Embedding) -> list[str]:
    if isinstance(part, spec.Patches):
        return ["image patches"]
    found = {
        "sinusoidal positions": isinstance(part.positions, spec.Sinusoidal),
        "token types": part.token_types > 0,
        "norms after the embedding": part.norm is not None,
        "projections after the embedding": part.projection is not None,
    }
    return [name for name, present in found.items() if present]


def _unsupported_block(block: spec.Block) -> list[str]:
    attention, ffn = block.attention, block.ffn
    expert = ffn.expert if isinstance(ffn, spec.Experts) else ffn
    found = {
        f"{type(block.placement).__name__} norm placement": isinstance(block.placement, spec.Post | spec.Parallel),
        "cross-attention": block.cross is not None,
        "mixtures of experts": isinstance(ffn, spec.Experts),
        f"activation {expert.activation}": expert.activation not in ACTIVATIONS,
        f"{type(attention.position).__name__} in attention": attention.position is not None
        and not isinstance(attention.position, spec.Rotary),
        "bidirectional attention": not attention.causal,
        "normalised queries and keys": attention.qk_norm is not None,
        "clipped queries, keys and values": attention.clip is not None,
    }
    return [name for name, present in found.items() if present]


class TokenEmbedding(nn.Module):
    """Token ids [T] and positions [T] to vectors [T, width]."""

    def __init__(self, part: spec.Tokens, place: Place):
        super().__init__()
        self.tokens = place.parameter(part.vocab_size, part.width)
        self.positions = None
        self.offset = 0
        if isinstance(part.positions, spec.Learned):
            self.positions = place.parameter(part.positions.size, part.width)
            self.offset = part.positions.offset
        # Rounded to the weights' format, as the checkpoint was trained.
        self.scale = torch.tensor(part.scale, dtype=place.dtype, device="cpu").item()

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        x = F.embedding(token_ids, self.tokens)
        if self.scale != 1.0:
            x = x * self.scale
        if self.positions is not None:
            x = x + F.embedding(positions + self.offset if self.offset else positions, self.positions)
        return x


class Sublayer(nn.Module):
    """x + after(f(before(x))), where either norm may be absent."""

    def __init__(self, before: nn.Module | None, inner: nn.Module, after: nn.Module | None):
        super().__init__()
        self.before = before
        self.inner = inner
        self.after = after

    def forward(self, x: Tensor, *context: object) -> Tensor:
        y = x if self.before is None else self.before(x)
        y = self.inner(y, *context)
        out: Tensor = x + (y if self.after is None else self.after(y))
        return out


class SequentialBlock(nn.Module):
    """Attention, then the feed-forward network, each with its own residual connection."""

    def __init__(self, block: spec.Block, hidden_size: int, backend: AttentionBackend, place: Place):
        super().__init__()
        before: tuple[spec.Norm | None, spec.Norm | None]
        after: tuple[spec.Norm | None, spec.Norm | None]
        match block.placement:
            case spec.Pre(attention, ffn):
                before, after = (attention, ffn), (None, None)
            case spec.AfterSublayer(attention, ffn):
                before, after = (None, None), (attention, ffn)
            case spec.Sandwich(before_attention, after_attention, before_ffn, after_ffn):
                before, after = (before_attention, before_ffn), (after_attention, after_ffn)
            case _:
                raise UnsupportedModelError(f"A {type(block.placement).__name__} block is not sequential.")
        attend = SelfAttention(block.attention, hidden_size, backend, place)
        feed: nn.Module
        match block.ffn:
            case spec.Dense():
                feed = DenseFeedForward(block.ffn, hidden_size, place)
            case spec.Gated():
                feed = GatedFeedForward(block.ffn, hidden_size, place)
            case _:
                raise UnsupportedModelError(f"There is no module for {type(block.ffn).__name__}.")
        norms = [build_norm(norm, hidden_size, place) for norm in (*before, *after)]
        self.attention = Sublayer(norms[0], attend, norms[2])
        self.ffn = Sublayer(norms[1], feed, norms[3])

    def forward(self, x: Tensor, cache: Paged, step: Step) -> Tensor:
        out: Tensor = self.ffn(self.attention(x, cache, step))
        return out


class DecoderStack(nn.Module):
    """Embedding, blocks over a paged cache, final norm."""

    def __init__(self, stack: spec.Stack, backend: AttentionBackend, max_model_len: int, place: Place):
        super().__init__()
        assert isinstance(stack.embedding, spec.Tokens)  # `unsupported` refused anything else
        self.embedding = TokenEmbedding(stack.embedding, place)
        self.blocks = nn.ModuleList(SequentialBlock(block, stack.hidden_size, backend, place) for block in stack.blocks)
        self.final_norm = build_norm(stack.final_norm, stack.hidden_size, place)
        # Layers with the same rotary part share one table, looked up once per step.
        heads = {b.attention.position: b.attention.head_dim for b in stack.blocks}
        self.rotary_parts = [part for part in heads if isinstance(part, spec.Rotary)]
        self.rotary_tables = nn.ModuleList(
            RotaryTable(part, heads[part], max_model_len, place.device) for part in self.rotary_parts
        )

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[Paged],
        slots: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        x: Tensor = self.embedding(token_ids, positions)
        tables = zip(self.rotary_parts, self.rotary_tables, strict=True)
        step = Step(slots, metadata, {part: table(positions, x.dtype) for part, table in tables})
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache, step)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return x


class Transformer(nn.Module):
    """A model built from a spec.

    Args:
        model: the parts.
        backend: computes attention.
        max_model_len: positions that will be asked for are below this.
        device, dtype: of the parameters; the CPU and float32 by default. Parameters are uninitialised.

    Raises:
        UnsupportedModelError: a part is not implemented.
        ConfigError: max_model_len exceeds a learned position table.
    """

    def __init__(
        self,
        model: spec.ModelSpec,
        backend: AttentionBackend,
        max_model_len: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        if missing := unsupported(model):
            raise UnsupportedModelError(f"This model needs parts that are not implemented: {', '.join(missing)}.")
        if model.max_positions is not None and max_model_len > model.max_positions:
            raise ConfigError(
                f"max_model_len is {max_model_len}, but the checkpoint has learned positions for "
                f"{model.max_positions} tokens only. Lower --max-model-len."
            )
        assert model.decoder is not None  # as `unsupported` found
        assert isinstance(model.head, spec.Lm)
        place = Place(torch.device(device), dtype)
        self.spec = model
        self.max_model_len = max_model_len
        self.head_part = model.head
        self.decoder = DecoderStack(model.decoder, backend, max_model_len, place)
        tokens = self.decoder.embedding.tokens if model.head.tied else None
        self.head = Linear(model.decoder.hidden_size, model.vocab_size, model.head.bias, place, shared=tokens)

    def pack(self) -> None:
        """Lay all matrices out for the CPU's kernels, once they are filled."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.spec.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """Format of weights, activations and cache."""
        return self.decoder.embedding.tokens.dtype

    @property
    def device(self) -> torch.device:
        return self.decoder.embedding.tokens.device

    def kv_shapes(self) -> list[tuple[int, int]]:
        """(kv_heads, head_dim) of each decoder layer's cache."""
        assert self.spec.decoder is not None
        return [(block.attention.kv_heads, block.attention.head_dim) for block in self.spec.decoder.blocks]

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[Paged],
        slots: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Hidden states after the final norm, [Tp, hidden], of Tp tokens laid end to end.

        Args:
            token_ids, positions: [Tp] int32 or int64. Tokens past the first T = len(slots) are padding
                that only keeps matrix products at an invariant number of rows: their K and V are written
                nowhere and their results mean nothing.
            caches: one per layer; K and V of the new tokens are written into them before attention.
            slots: [T] int64, block * block_size + offset of each new token.
            metadata: the R rows that the T tokens form.
        """
        hidden: Tensor = self.decoder(token_ids, positions, caches, slots, metadata)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, vocabulary] of hidden states [N, hidden]."""
        part = self.head_part
        if part.input_scale != 1.0:
            hidden = hidden * part.input_scale
        logits: Tensor = self.head(hidden)
        logits = logits.float()
        if part.logit_scale != 1.0:
            logits = logits * part.logit_scale
        if part.softcap is not None:
            logits = torch.tanh(logits / part.softcap) * part.softcap
        return logits
