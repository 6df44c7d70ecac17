"""GPT-J and CodeGen: parallel blocks with one norm, partial rotary positions of neighbouring features, a head with a
bias (arXiv:2203.13474)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, even_head_dim, head, linear, norm, qkv
from engine.model.normalisation import Norm
from engine.model.positions import Rotary
from engine.model.spec import Attention, Block, Dense, Lm, ModelSpec, Parallel, Stack, Tokens
from engine.model.table import Entry, Family, Interleaved, WeightTable

THETA = 10_000.0  # no setting of the config
CORES = 4  # CodeGen stores queries, values and keys for each core of the machine that it was trained on


def spec(config: Any) -> ModelSpec:
    norm = Norm("layer", config.layer_norm_epsilon, bias=True)
    head_dim = even_head_dim(config.n_embd, config.n_head)
    if config.model_type == "codegen" and config.n_head % CORES:
        raise UnsupportedModelError(f"n_head must be a multiple of {CORES} for this architecture, got {config.n_head}.")
    rotated = config.rotary_dim
    if not rotated or rotated < 0 or rotated % 2 or rotated > head_dim:
        raise UnsupportedModelError(
            f"rotary_dim must be an even number from 2 to the {head_dim} features of a head, got {rotated}."
        )
    block = Block(
        placement=Parallel((norm,)),
        attention=Attention(
            heads=config.n_head,
            kv_heads=config.n_head,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=Rotary(rotated, THETA, interleaved=True),
        ),
        ffn=Dense(
            4 * config.n_embd if config.n_inner is None else config.n_inner,
            activation(config.activation_function),
            bias=True,
        ),
    )
    decoder = Stack(
        hidden_size=config.n_embd,
        embedding=Tokens(vocab_size=config.vocab_size, width=config.n_embd),
        blocks=(block,) * config.n_layer,
        final_norm=norm,
    )
    # The bias belongs to the head, which the headless model does not store.
    bias = config.architectures[0].endswith("ForCausalLM")
    return ModelSpec(encoder=None, decoder=decoder, head=Lm(tied=config.tie_word_embeddings, bias=bias))


def weights(model: ModelSpec) -> WeightTable:
    assert model.decoder is not None
    entries = [
        Entry("decoder.embedding.tokens", ("transformer.wte.weight",), shard_axis=0),
        *norm("decoder.final_norm", "transformer.ln_f", bias=True),
        *head(model, "lm_head"),
    ]
    for i, block in enumerate(model.decoder.blocks):
        target, source = f"decoder.blocks.{i}", f"transformer.h.{i}"
        projections = (f"{source}.attn.q_proj", f"{source}.attn.k_proj", f"{source}.attn.v_proj")
        inner, width = f"{target}.attention.inner", block.attention.heads * block.attention.head_dim
        fused = Interleaved(CORES, 1, width // CORES, order=(0, 2, 1))
        entries += [
            *norm(f"{target}.attention.before", f"{source}.ln_1", bias=True),
            *qkv(f"{inner}.qkv", projections, block.attention),
            *linear(f"{inner}.qkv", f"{source}.attn.qkv_proj", False, 0, fused),
            *linear(f"{inner}.out", f"{source}.attn.out_proj", False, 1),
            *linear(f"{target}.ffn.inner.up", f"{source}.mlp.fc_in", True, 0),
            *linear(f"{target}.ffn.inner.down", f"{source}.mlp.fc_out", True, 1),
        ]
    return WeightTable(
        tuple(entries),
        prefix="transformer.",
        # Causal masks that old checkpoints store as buffers.
        ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias|causal_mask)",),
        head="lm_head.weight",
    )


FAMILY = Family(
    name="GPT-J and CodeGen",
    architectures=("GPTJForCausalLM", "GPTJModel", "CodeGenForCausalLM", "CodeGenModel"),
    headless=("GPTJModel", "CodeGenModel"),
    brings="parallel blocks with one norm, partial and interleaved rotary positions, a bias in the head",
    spec=spec,
    weights=weights,
)
