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
from engine.model.bias import BiasTable
from engine.model.experts import ExpertMatrices, ExpertsFeedForward
from engine.model.layers import (
    ACTIVATIONS,
    DenseFeedForward,
    GatedFeedForward,
    Linear,
    Place,
    SelfAttention,
    Step,
    build_norm,
)
from engine.model.positions import Disentangled, Learned, RelativeBuckets, Rotary, RoundedSlopes, Sinusoidal, Slopes
from engine.model.rotary import RotaryTable


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
        "sinusoidal positions": isinstance(part.positions, Sinusoidal),
        "token types": part.token_types > 0,
    }
    return [name for name, present in found.items() if present]


def _unsupported_block(block: spec.Block) -> list[str]:
    attention, ffn = block.attention, block.ffn
    expert = ffn.expert if isinstance(ffn, spec.Experts) else ffn
    found = {
        "cross-attention": block.cross is not None,
        "experts with biases": isinstance(ffn, spec.Experts) and expert.bias,
        f"activation {expert.activation}": expert.activation not in ACTIVATIONS,
        f"{type(attention.position).__name__} in attention": isinstance(
            attention.position, RelativeBuckets | Disentangled
        ),
        "bidirectional attention": not attention.causal,
    }
    return [name for name, present in found.items() if present]


class TokenEmbedding(nn.Module):
    """Token ids [T] and positions [T] to vectors [T, hidden]."""

    def __init__(self, part: spec.Tokens, place: Place):
        super().__init__()
        hidden = part.projection or part.width
        self.tokens = place.parameter(part.vocab_size, part.width)
        self.projection = None if part.projection is None else Linear(part.width, hidden, False, place)
        self.positions = None
        self.offset = 0
        if isinstance(part.positions, Learned):
            self.positions = place.parameter(part.positions.size, hidden)
            self.offset = part.positions.offset
        self.norm = build_norm(part.norm, hidden, place)
        # Rounded to the weights' format, as the checkpoint was trained.
        self.scale = torch.tensor(part.scale, dtype=place.dtype, device="cpu").item()

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        x = F.embedding(token_ids, self.tokens)
        if self.scale != 1.0:
            x = x * self.scale
        if self.projection is not None:
            x = self.projection(x)
        if self.positions is not None:
            x = x + F.embedding(positions + self.offset if self.offset else positions, self.positions)
        if self.norm is not None:
            x = self.norm(x)
        return x


class Sublayer(nn.Module):
    """outer(y + after(f(before(y)))) of y = first(x), where each norm may be absent."""

    def __init__(
        self,
        inner: nn.Module,
        first: nn.Module | None = None,
        before: nn.Module | None = None,
        after: nn.Module | None = None,
        outer: nn.Module | None = None,
    ):
        super().__init__()
        self.first = first
        self.before = before
        self.inner = inner
        self.after = after
        self.outer = outer

    def forward(self, x: Tensor, *context: object) -> Tensor:
        if self.first is not None:
            x = self.first(x)
        y = x if self.before is None else self.before(x)
        y = self.inner(y, *context)
        y = x + (y if self.after is None else self.after(y))
        out: Tensor = y if self.outer is None else self.outer(y)
        return out


class SequentialBlock(nn.Module):
    """Attention, then the feed-forward network, each with its own residual connection."""

    def __init__(self, block: spec.Block, hidden_size: int, backend: AttentionBackend, place: Place):
        super().__init__()
        norms: dict[str, tuple[spec.Norm | None, spec.Norm | None]]
        match block.placement:
            case spec.Pre(attention, ffn):
                norms = {"before": (attention, ffn)}
            case spec.NormedResidual(attention, ffn):
                norms = {"first": (attention, ffn)}
            case spec.Post(attention, ffn):
                norms = {"outer": (attention, ffn)}
            case spec.AfterSublayer(attention, ffn):
                norms = {"after": (attention, ffn)}
            case spec.Sandwich(before_attention, after_attention, before_ffn, after_ffn):
                norms = {"before": (before_attention, before_ffn), "after": (after_attention, after_ffn)}
            case _:
                raise UnsupportedModelError(f"A {type(block.placement).__name__} block is not sequential.")
        attention_norms, ffn_norms = (
            {name: build_norm(pair[i], hidden_size, place) for name, pair in norms.items()} for i in (0, 1)
        )
        self.attention = Sublayer(SelfAttention(block.attention, hidden_size, backend, place), **attention_norms)
        self.ffn = Sublayer(build_feed_forward(block.ffn, hidden_size, place), **ffn_norms)

    def forward(self, x: Tensor, cache: Paged, step: Step) -> Tensor:
        out: Tensor = self.ffn(self.attention(x, cache, step), step)
        return out


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + ffn(norm(x)), where both may read the same norm.

    Parameters have the names that they have in a sequential block; a single norm is attention's.
    """

    def __init__(self, block: spec.Block, hidden_size: int, backend: AttentionBackend, place: Place):
        super().__init__()
        assert isinstance(block.placement, spec.Parallel)
        norms = [build_norm(norm, hidden_size, place) for norm in block.placement.norms]
        self.attention = Sublayer(SelfAttention(block.attention, hidden_size, backend, place), before=norms[0])
        self.ffn = Sublayer(
            build_feed_forward(block.ffn, hidden_size, place), before=norms[1] if len(norms) > 1 else None
        )

    def forward(self, x: Tensor, cache: Paged, step: Step) -> Tensor:
        assert self.attention.before is not None
        normed = self.attention.before(x)
        attended = self.attention.inner(normed, cache, step)
        fed = self.ffn.inner(normed if self.ffn.before is None else self.ffn.before(x), step)
        out: Tensor = x + attended + fed
        return out


def build_feed_forward(part: spec.FeedForward, hidden_size: int, place: Place) -> nn.Module:
    """The module of a feed-forward network."""
    match part:
        case spec.Dense():
            return DenseFeedForward(part, hidden_size, place)
        case spec.Gated():
            return GatedFeedForward(part, hidden_size, place)
        case spec.Experts():
            return ExpertsFeedForward(part, hidden_size, place)


def build_block(block: spec.Block, hidden_size: int, backend: AttentionBackend, place: Place) -> nn.Module:
    """The module of one layer."""
    kind = ParallelBlock if isinstance(block.placement, spec.Parallel) else SequentialBlock
    return kind(block, hidden_size, backend, place)


class DecoderStack(nn.Module):
    """Embedding, blocks over a paged cache, final norm, projection."""

    def __init__(self, stack: spec.Stack, backend: AttentionBackend, max_model_len: int, place: Place):
        super().__init__()
        assert isinstance(stack.embedding, spec.Tokens)  # `unsupported` refused anything else
        self.embedding = TokenEmbedding(stack.embedding, place)
        self.blocks = nn.ModuleList(build_block(block, stack.hidden_size, backend, place) for block in stack.blocks)
        self.final_norm = build_norm(stack.final_norm, stack.hidden_size, place)
        self.projection = None
        if stack.projection is not None:
            self.projection = Linear(stack.hidden_size, stack.projection, False, place)
        # Layers with the same position part share one table, looked up once per step.
        heads = {b.attention.position: b.attention.head_dim for b in stack.blocks}
        self.rotary_parts = [part for part in heads if isinstance(part, Rotary)]
        self.rotary_tables = nn.ModuleList(
            RotaryTable(part, heads[part], max_model_len, place.device) for part in self.rotary_parts
        )
        self.bias_parts = [part for part in heads if isinstance(part, Slopes | RoundedSlopes)]
        self.bias_tables = nn.ModuleList(BiasTable(part, max_model_len, place.device) for part in self.bias_parts)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[Paged],
        slots: Tensor,
        metadata: AttentionMetadata,
        min_rows: int,
    ) -> Tensor:
        x: Tensor = self.embedding(token_ids, positions)
        rotary = zip(self.rotary_parts, self.rotary_tables, strict=True)
        biases = zip(self.bias_parts, self.bias_tables, strict=True)
        step = Step(
            slots,
            metadata,
            rotations={part: table(positions, x.dtype) for part, table in rotary},
            biases={part: table() for part, table in biases},
            min_rows=min_rows,
        )
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache, step)
        if self.final_norm is not None:
            x = self.final_norm(x)
        if self.projection is not None:
            x = self.projection(x)
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
        self.head = Linear(model.decoder.output_size, model.vocab_size, model.head.bias, place, shared=tokens)

    def pack(self) -> None:
        """Lay all matrices out for the CPU's kernels, once they are filled."""
        for module in self.modules():
            if isinstance(module, Linear | ExpertMatrices):
                module.pack()

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.spec.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """Format of weights and activations; the cache may have another."""
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
        min_rows: int = 1,
    ) -> Tensor:
        """Hidden states after the final norm, [Tp, hidden], of Tp tokens laid end to end.

        Args:
            token_ids, positions: [Tp] int32 or int64. Tokens past the first T = len(slots) are padding
                that only keeps matrix products at an invariant number of rows: their K and V are written
                nowhere and their results mean nothing.
            caches: one per layer; K and V of the new tokens are written into them before attention.
            slots: [T] int64, block * block_size + offset of each new token.
            metadata: the R rows that the T tokens form.
            min_rows: fewest rows of a matrix product; Tp is no less.
        """
        hidden: Tensor = self.decoder(token_ids, positions, caches, slots, metadata, min_rows)
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
