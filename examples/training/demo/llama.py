"""A LLaMA in plain torch, for training; the export gives the names and the shapes of transformers' LlamaForCausalLM."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NORM_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the model.

    Attributes:
        vocab: tokens.
        hidden: width of the residual stream.
        layers: blocks.
        heads: query heads; each is hidden / heads wide.
        kv_heads: key-value heads.
        ffn: inner width of the gated feed-forward layers.
        context: longest sequence, in tokens.
        theta: base of the rotary angles.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    context: int
    theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads


class Block(nn.Module):
    """Attention, then a gated feed-forward layer, each with an RMS norm before it (arXiv 2302.13971)."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        width, inner = shape.hidden, shape.kv_heads * shape.head_dim
        self.attention_norm = nn.Parameter(torch.ones(width))
        self.qkv = nn.Linear(width, width + 2 * inner, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.ffn_norm = nn.Parameter(torch.ones(width))
        self.gate_up = nn.Linear(width, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [rows, length, hidden]; cos, sin: [length, head_dim]."""
        rows, length, width = x.shape
        inner = self.shape.kv_heads * self.shape.head_dim
        q, k, v = self.qkv(rms_norm(x, self.attention_norm)).split([width, inner, inner], dim=-1)
        q = rotate(q.view(rows, length, -1, self.shape.head_dim).transpose(1, 2), cos, sin)
        k = rotate(k.view(rows, length, -1, self.shape.head_dim).transpose(1, 2), cos, sin)
        v = v.view(rows, length, -1, self.shape.head_dim).transpose(1, 2)
        group = self.shape.heads // self.shape.kv_heads
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        mixed = attend(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        gate, up = self.gate_up(rms_norm(x, self.ffn_norm)).chunk(2, dim=-1)
        x = x + self.down(F.silu(gate) * up)
        return x


class Llama(nn.Module):
    """Tied embeddings, blocks, a last norm."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        angles = torch.outer(
            torch.arange(shape.context, dtype=torch.float32),
            shape.theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim),
        ).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        # What writes to the residual stream starts smaller the more blocks there are (GPT-2).
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.04)
                if name.endswith(("out.weight", "down.weight")):
                    parameter.data /= (2 * self.shape.layers) ** 0.5

    def hidden_states(self, ids: Tensor) -> Tensor:
        """The last norm's output [rows, length, hidden] for ids [rows, length]."""
        x = self.embedding(ids)
        cos, sin = self.get_buffer("cos")[: ids.shape[1]], self.get_buffer("sin")[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return rms_norm(x, self.norm)

    def forward(self, ids: Tensor, chosen: Tensor) -> Tensor:
        """Logits [n, vocab] at the n positions of ids [rows, length] that `chosen`, a mask of that shape, marks."""
        return F.linear(self.hidden_states(ids)[chosen], self.embedding.weight)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm (arXiv 1910.07467), in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + NORM_EPS) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864), half against half, as in LLaMA's checkpoints of transformers."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; q, k, v: [rows, heads, length, head_dim].

    Written out, since torch's fused kernel takes twice the time at this size in bfloat16 on a CPU (32 and 15 ms for
    8 rows of 256 tokens and 6 heads).
    """
    length = q.shape[2]
    future = torch.full((length, length), -1e30, dtype=q.dtype, device=q.device).triu(1)
    with torch.autocast(q.device.type, enabled=False):
        scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2)) + future
        return torch.matmul(scores.softmax(-1), v)


def to_transformers(model: Llama) -> dict[str, Tensor]:
    """The weights in float32, under the names of LlamaForCausalLM; the head is the embedding and has no name."""
    shape, inner = model.shape, model.shape.kv_heads * model.shape.head_dim
    weights = {"model.embed_tokens.weight": model.embedding.weight, "model.norm.weight": model.norm}
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        name = f"model.layers.{number}."
        q, k, v = torch.split(block.qkv.weight, [shape.hidden, inner, inner])
        gate, up = block.gate_up.weight.chunk(2)
        weights |= {
            name + "input_layernorm.weight": block.attention_norm,
            name + "self_attn.q_proj.weight": q,
            name + "self_attn.k_proj.weight": k,
            name + "self_attn.v_proj.weight": v,
            name + "self_attn.o_proj.weight": block.out.weight,
            name + "post_attention_layernorm.weight": block.ffn_norm,
            name + "mlp.gate_proj.weight": gate,
            name + "mlp.up_proj.weight": up,
            name + "mlp.down_proj.weight": block.down.weight,
        }
    return {name: weight.detach().float().clone() for name, weight in weights.items()}


def to_config(shape: Shape, bos: int, eos: int, dtype: str) -> dict[str, object]:
    """config.json of transformers."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
    }
