"""The transformer against `transformers` on tiny random checkpoints, in float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.pages import Pages, close, load
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotation
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as olmo2_rotation

from engine.backends.attention.base import AttentionMetadata
from engine.backends.torch.attention import TorchReference
from engine.errors import ConfigError
from engine.model import families
from engine.model.blocks import Sublayer
from engine.model.executors.reference import HANDLERS, Pass
from engine.model.inputs import Inputs
from engine.model.layers import DenseFeedForward
from engine.model.normalisation import Norm
from engine.model.norms import RmsNorm, build_norm
from engine.model.place import Place
from engine.model.positions import Rotary
from engine.model.program import Builder
from engine.model.rotary import RotaryTable, rotate
from engine.model.spec import Dense
from engine.model.tables import Tables
from engine.model.transformer import Transformer

VOCAB = 61
CPU = torch.device("cpu")


def llama(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(values | changes)))


def gpt2(**changes: Any) -> Any:
    values = {"vocab_size": VOCAB, "n_embd": 20, "n_layer": 3, "n_head": 4, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**(values | changes)))


def gemma2(**changes: Any) -> Any:
    values = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 10,
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    }
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**(values | changes)))


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}

MODELS: dict[str, Callable[[], Any]] = {
    "llama-grouped-untied": llama,
    "llama-tied": lambda: llama(tie_word_embeddings=True, num_key_value_heads=1),
    "llama-multihead-theta": lambda: llama(num_key_value_heads=6, rope_parameters={"rope_theta": 777.0}),
    "llama-biases-own-head-dim": lambda: llama(attention_bias=True, mlp_bias=True, head_dim=10),
    "llama-linear-scaling": lambda: llama(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}),
    "llama-band-scaling": lambda: llama(head_dim=16, rope_parameters=LLAMA3_ROPE),
    "llama-gelu": lambda: llama(hidden_act="gelu", rms_norm_eps=1e-2),
    "gpt2-odd-head-dim": gpt2,
    "gpt2-scales": lambda: gpt2(scale_attn_by_inverse_layer_idx=True, n_inner=30, activation_function="relu"),
    "gpt2-unscaled": lambda: gpt2(scale_attn_weights=False, layer_norm_epsilon=1e-2, reorder_and_upcast_attn=True),
    "gpt2-untied": lambda: gpt2(tie_word_embeddings=False, activation_function="gelu"),
    "gemma2-windows-softcaps": gemma2,
}


def randomised(model: Any) -> Any:
    """No weight is left at 0 or 1, so that a norm or bias that is forgotten shows."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            centre = 1.0 if "norm" in name or "ln_" in name else 0.0
            parameter.copy_(centre + 0.3 * noise)
    return model.eval()


TABLES = [[5, 2, 9, 1, 7, 3], [4, 8, 6, 10, 11, 12]]


@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers_whole_in_chunks_and_in_company(name: str, tmp_path: Path) -> None:
    reference = randomised(MODELS[name]())
    reference.set_attn_implementation("eager")
    reference.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(VOCAB, (21,), generator=generator).tolist()
    other = torch.randint(VOCAB, (9,), generator=generator).tolist()
    with torch.no_grad():
        answers = [reference(torch.tensor([p]), output_hidden_states=True) for p in (prompt, other)]
    hidden, hidden_other = (a.hidden_states[-1][0] for a in answers)
    model = load(tmp_path)

    (whole,) = Pages(model, TABLES[:1]).step([prompt])
    close(whole, hidden)
    with torch.inference_mode():
        close(model.logits(whole), answers[0].logits[0])

    pages = Pages(model, TABLES)
    pieces = [pages.step([prompt[:6], other[:8]], padding=3), pages.step([prompt[6:20], other[8:]])]
    close(torch.cat([pieces[0][0], pieces[1][0]]), hidden[:20])
    close(torch.cat([pieces[0][1], pieces[1][1]]), hidden_other)
    alone = Pages(model, TABLES[:1])
    alone.step([prompt[:20]])
    close(alone.step([prompt[20:]], padding=5)[0], hidden[20:])


def test_writes_only_the_slots_it_is_given(tmp_path: Path) -> None:
    randomised(llama()).save_pretrained(tmp_path)
    pages = Pages(load(tmp_path), TABLES[:1])
    pages.step([[1, 2, 3, 4, 5]], padding=4)
    for cache in pages.caches:
        for tensor in (cache.keys, cache.values):
            written = tensor.isfinite().all(-1).all(-1).nonzero().tolist()
            assert written == [[2, 0], [5, 0], [5, 1], [5, 2], [5, 3]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    reference = randomised(llama())
    reference.save_pretrained(tmp_path)
    model = load(tmp_path, dtype)
    assert model.dtype == dtype
    prompt = list(range(1, 12))
    (hidden,) = Pages(model, TABLES[:1]).step([prompt])
    assert hidden.dtype == dtype
    with torch.inference_mode():
        logits = model.logits(hidden)
        expected = reference(torch.tensor([prompt])).logits[0]
    assert logits.dtype == torch.float32
    tolerance = 0.05 if dtype == torch.bfloat16 else 0.01
    assert float((logits - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("part", "theirs"),
    [
        (Norm("rms", 1e-5), LlamaRMSNorm),
        (Norm("rms", 1e-5, unit_offset=True), Gemma2RMSNorm),
        (Norm("rms", 1e-5, in_float32=True), Olmo2RMSNorm),
    ],
)
def test_rms_norm_rounds_like_transformers(part: Norm, theirs: Any, dtype: torch.dtype) -> None:
    x = 3 * torch.randn(50, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = torch.randn(40, generator=torch.Generator().manual_seed(2)).to(dtype)
    theirs = theirs(40, eps=1e-5).to(dtype)
    ours = RmsNorm(part, 40, Place(CPU, dtype))
    with torch.no_grad():
        theirs.weight.copy_(weight)
        assert ours.weight is not None
        ours.weight.copy_(weight)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6 if dtype == torch.float32 else 0, atol=0)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_without_a_weight(kind: str, dtype: torch.dtype) -> None:
    part = Norm("rms" if kind == "rms" else "layer", 1e-5, weight=False)
    norm = build_norm(part, 40, Place(CPU, dtype))
    assert norm is not None
    assert list(norm.parameters()) == []
    x = 3 * torch.randn(50, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    wide = x.double() if kind == "rms" else x.double() - x.double().mean(1, keepdim=True)
    expected = wide * (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(norm(x), expected.to(dtype), rtol=0.01, atol=0)


@pytest.mark.parametrize("parameters", [{"rope_theta": 1e4}, {"rope_theta": 5e5}, LLAMA3_ROPE])
def test_rotary_tables_equal_transformers(parameters: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(
        head_dim=16, rope_parameters=dict(parameters), max_position_embeddings=4096, architectures=["LlamaForCausalLM"]
    )
    positions = torch.tensor([0, 1, 77, 4095])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    decoder = families.build_spec(config).decoder
    assert decoder is not None
    part = decoder.blocks[0].attention.position
    assert isinstance(part, Rotary)
    table = RotaryTable(part, 16, 4096, CPU)
    ours_cos, ours_sin = table(positions, torch.float32)
    torch.testing.assert_close(ours_cos[:, 0], cos[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours_sin[:, 0], sin[0, :, :8], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("in_float32", "rotation"), [(False, llama_rotation), (True, olmo2_rotation)])
def test_rotation_rounds_like_transformers(in_float32: bool, rotation: Any) -> None:
    """In bfloat16: with rounded cosines and sines, or all of it in float32."""
    part = Rotary(dim=16, theta=100.0, in_float32=in_float32)
    cos, sin = RotaryTable(part, 16, 64, CPU)(torch.arange(40), torch.bfloat16)
    assert cos.dtype == sin.dtype == (torch.float32 if in_float32 else torch.bfloat16)
    x = torch.randn(40, 3, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    theirs, _ = rotation(x[None], x[None], cos.transpose(0, 1), torch.cat((sin, sin), dim=-1).transpose(0, 1), 2)
    ours = rotate(x, part, cos, sin)
    assert ours.dtype == torch.bfloat16
    if in_float32:
        torch.testing.assert_close(ours, theirs[0], rtol=0, atol=0)
    else:
        torch.testing.assert_close(ours, theirs[0], rtol=2e-2, atol=2e-2)


def test_interleaved_rotation_turns_neighbouring_pairs_and_leaves_the_rest() -> None:
    part = Rotary(dim=6, theta=100.0, interleaved=True)
    x = torch.randn(5, 2, 10, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 3, 1, 9, 4])
    out = rotate(x, part, *RotaryTable(part, 10, 16, CPU)(positions, torch.float32))
    angles = positions[:, None] * 100.0 ** (-torch.arange(3) / 3)
    turned = torch.view_as_complex(x[..., :6].reshape(5, 2, 3, 2)) * torch.polar(torch.ones(5, 1, 3), angles[:, None])
    torch.testing.assert_close(out[..., :6], torch.view_as_real(turned).flatten(-2))
    assert torch.equal(out[..., 6:], x[..., 6:])


def test_learned_positions_limit_the_length(tmp_path: Path) -> None:
    randomised(gpt2()).save_pretrained(tmp_path)
    assert load(tmp_path, max_model_len=64).spec.max_positions == 64
    with pytest.raises(ConfigError, match=r"max_model_len is 65.*64 tokens.*--max-model-len"):
        load(tmp_path, max_model_len=65)


def test_parameters_ask_for_no_gradients_and_shapes_are_told(tmp_path: Path) -> None:
    randomised(llama()).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert not any(p.requires_grad for p in model.parameters())
    assert model.kv_shapes() == [(2, 4, 2)] * 3
    assert (model.vocab_size, model.device, model.training) == (VOCAB, CPU, False)


@pytest.mark.parametrize("places", list(itertools.product([False, True], repeat=4)))
def test_a_sublayer_norms_where_it_is_told_to_and_adds(places: tuple[bool, bool, bool, bool]) -> None:
    inner = DenseFeedForward(Dense(16, "relu"), 8, Place(CPU, torch.float32))
    generator = torch.Generator().manual_seed(1)
    for linear in (inner.up, inner.down):
        linear.weight.data.normal_(generator=generator)

    def feed(x: Tensor) -> Tensor:
        return (x @ inner.up.weight.T).relu() @ inner.down.weight.T

    def norm(x: Tensor, wanted: bool) -> Tensor:
        return torch.nn.functional.layer_norm(x, (8,)) if wanted else x

    first, before, after, outer = places
    x = 1.0 + 2.0 * torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    start = norm(x, first)
    expected = norm(start + norm(feed(norm(start, before)), after), outer)
    norms = [torch.nn.LayerNorm(8) if wanted else None for wanted in places]
    builder = Builder(8, paged=False)
    builder.sublayer(Sublayer(inner, *norms), 0)
    result = builder.normed(None)
    inputs = Inputs(token_ids=x, positions=x, metadata=AttentionMetadata.build([3], [3], CPU), tokens=3)
    state = Pass(inputs, Tables({}, {}), {builder.stream: x})
    for operation in builder.operations:
        HANDLERS[type(operation)](operation, state)
    torch.testing.assert_close(state.values[result], expected)


def test_a_layer_may_leave_the_encoder_out() -> None:
    """Then it equals one whose attention to the encoder adds nothing."""
    config = transformers.T5Config(
        architectures=["T5ForConditionalGeneration"], vocab_size=31, d_model=16, d_kv=4, d_ff=24, num_heads=2
    )
    model = families.build_spec(config)
    assert model.decoder is not None
    first, *others = model.decoder.blocks
    decoder = replace(model.decoder, blocks=(replace(first, cross=None), *others))
    silent = Transformer(model, TorchReference(), 16)
    without = Transformer(replace(model, decoder=decoder), TorchReference(), 16)
    torch.manual_seed(0)
    for parameter in silent.parameters():
        parameter.normal_(std=0.3)
    silent.get_parameter("decoder.blocks.0.cross.inner.out.weight").zero_()
    assert not without.load_state_dict(silent.state_dict(), strict=False).missing_keys
    results = []
    for module in (silent, without):
        pages = Pages(module, [[1, 2], [3, 4]], more=2)
        pages.encode([[5, 9, 3], [7]], [[5], [6]])
        results.append(torch.cat(pages.step([[1, 2, 3, 4, 5], [6]])))
    assert torch.equal(*results)
    assert results[0].isfinite().all()
