"""Decoders whose parts are their own: settings that are refused, and forms in which weights
are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.families import FAMILY_SHAPES, make_family_checkpoint
from support.family_shape import run
from support.pages import Pages, close, load, scattered_tables
from torch import Tensor

from engine.backends.torch.attention import TorchReference
from engine.errors import ConfigError, UnsupportedModelError
from engine.model import families
from engine.model.place import Place
from engine.model.spec import ModelSpec, Xielu
from engine.model.table import Flattened, Interleaved, Joined, Same, Swapped, Turned
from engine.model.transformer import Transformer


def described(model_type: str, architecture: str, **settings: Any) -> ModelSpec:
    return families.build_spec(transformers.AutoConfig.for_model(model_type, architectures=[architecture], **settings))


@pytest.mark.parametrize(
    ("model_type", "architecture", "settings", "message"),
    [
        ("openai-gpt", "OpenAIGPTLMHeadModel", {"afn": "mish"}, "afn of the config must be one of relu, gelu, silu"),
        (
            "gpt_neo",
            "GPTNeoForCausalLM",
            {"attention_types": [[["far"], 24]]},
            "attention_types of the config holds 'far'",
        ),
        ("gpt_neo", "GPTNeoForCausalLM", {"window_size": 0}, "sliding_window of the config must be at least 1"),
        ("codegen", "CodeGenForCausalLM", {"n_embd": 96, "n_head": 6}, "n_head must be a multiple of 4 .* got 6"),
        ("codegen", "CodeGenForCausalLM", {"rotary_dim": 0}, "rotary_dim must be an even number"),
        ("xglm", "XGLMForCausalLM", {"pad_token_id": 5}, "pad_token_id must be below 2 .* got 5"),
        ("xglm", "XGLMForCausalLM", {"add_cross_attention": True}, "add_cross_attention must be false"),
        ("ctrl", "CTRLLMHeadModel", {"n_head": 7}, "7 attention heads cannot share"),
        (
            "granite",
            "GraniteForCausalLM",
            {"num_key_value_heads": 5},
            "32 attention heads and 5 KV heads: the first must",
        ),
        ("dbrx", "DbrxForCausalLM", {"attn_config": {"kv_n_heads": 7}}, "16 attention heads and 7 KV heads"),
        (
            "hunyuan_v1_moe",
            "HunYuanMoEV1ForCausalLM",
            {"moe_topk": [1, 1]},
            "moe_topk .* 32, but has 2",
        ),
        ("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", {"moe_topk": 2}, "num_experts_per_tok .* from 1 to .* 1; got 2"),
        (
            "modernbert-decoder",
            "ModernBertDecoderForSequenceClassification",
            {},
            "its layer before the class scores is not implemented",
        ),
        ("modernbert-decoder", "ModernBertDecoderForCausalLM", {"local_attention": 0}, "sliding_window .* at least 1"),
        (
            "dbrx",
            "DbrxForCausalLM",
            {"ffn_config": {"moe_normalize_expert_weights": 2.0}},
            "must be 1 or null, got 2.0",
        ),
        ("dbrx", "DbrxForCausalLM", {"ffn_config": {"ffn_act_fn": {"name": "silu", "beta": 2}}}, "also contains beta"),
        (
            "dbrx",
            "DbrxForCausalLM",
            {
                "attn_config": {"rope_theta": 500.0},
                "rope_parameters": {"rope_type": "default", "rope_theta": 600.0},
            },
            "attn_config.rope_theta is 500.0, and rope_parameters has 600.0",
        ),
        ("doge", "DogeForCausalLM", {"is_moe": True}, "is_moe of the config is true: the experts of a token"),
        ("doge", "DogeForCausalLM", {"keep_window_size": 0}, "keep_window_size .* at least 1, got 0"),
        ("apertus", "ApertusForCausalLM", {"hidden_act": "mish"}, "activation 'mish'"),
    ],
)
def test_refusals(model_type: str, architecture: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        described(model_type, architecture, **settings)


def test_doge_takes_no_sequence_of_which_it_would_leave_out_keys() -> None:
    spec = described("doge", "DogeForCausalLM", keep_window_size=50)
    assert (spec.context_length, spec.max_positions) == (50, 50)
    with pytest.raises(ConfigError, match="max_model_len is 51, but the checkpoint has positions for 50 tokens only"):
        Transformer(spec, TorchReference(), 51, device="meta")


# ---------------------------------------------------------------- forms of weights


def filled(transform: Any, shape: tuple[int, ...], *sources: Tensor) -> Tensor:
    target = torch.full(shape, -1.0)
    assert [source.shape for source in sources] == transform.shapes(target.shape)
    for place, source in enumerate(sources):
        transform.fill(target, place, source)
    return target


def test_halves_of_pieces_are_swapped() -> None:
    x = torch.arange(12.0).view(6, 2)
    assert torch.equal(filled(Swapped(), (6, 2), x), x[[3, 4, 5, 0, 1, 2]])
    x = torch.arange(8.0)
    assert torch.equal(filled(Swapped(2), (8,), x), x[[2, 3, 0, 1, 6, 7, 4, 5]])
    assert torch.equal(filled(Joined((4, 2), (Swapped(), Same())), (6,), x[:4], x[4:6]), x[[2, 3, 0, 1, 4, 5]])


def test_groups_are_stored_in_any_order() -> None:
    """Two groups of one query, one value and one key of two features each."""
    x = torch.arange(12.0)
    assert filled(Interleaved(2, 1, 2, order=(0, 2, 1)), (12,), x).tolist() == [0, 1, 6, 7, 4, 5, 10, 11, 2, 3, 8, 9]
    assert filled(Interleaved(2, 1, 2), (12,), x).tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]


def test_stacks_are_stored_flat() -> None:
    gates, ups = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    made = filled(Flattened(parts=2), (3, 4, 4), gates.flatten(0, 1), ups.flatten(0, 1))
    assert torch.equal(made, torch.cat((gates, ups), dim=1))
    downs = torch.randn(3, 4, 2)
    assert torch.equal(filled(Flattened(Turned()), (3, 4, 2), downs.transpose(1, 2).reshape(6, 4)), downs)


def test_xielu_is_the_references() -> None:
    from transformers.activations import XIELUActivation

    from engine.model.layers import XieluFeedForward

    theirs = XIELUActivation(dtype=torch.float32)
    theirs.alpha_p.data.fill_(0.7)
    theirs.alpha_n.data.fill_(-0.4)
    ours = XieluFeedForward(Xielu(70), 8, Place(torch.device("cpu"), torch.float32))
    for parameter, value in zip(
        (ours.positive, ours.negative, ours.linear, ours.least), (0.7, -0.4, 0.5, -1e-6), strict=True
    ):
        parameter.fill_(value)
    x = torch.randn(40, 70, generator=torch.Generator().manual_seed(0)) * 3
    torch.testing.assert_close(ours.activate(x), theirs(x).detach())
    assert torch.equal(ours.activate(x)[7:8], ours.activate(x[7:8]))


def test_xielus_constants_may_be_left_out_and_are_honoured_where_stored(tmp_path: Path) -> None:
    shape = FAMILY_SHAPES["apertus"]
    model = make_family_checkpoint(shape, tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    assert sum(name.endswith((".beta", ".eps")) for name in stored) == 4
    save_file({name: tensor for name, tensor in stored.items() if not name.endswith((".beta", ".eps"))}, file)
    (prompt,) = model.ragged()[:1]

    def ours() -> Tensor:
        loaded = load(tmp_path, max_model_len=shape.max_model_len)
        (hidden,) = Pages(loaded, scattered_tables([len(prompt)]), reach=[len(prompt)]).step([prompt])
        return hidden

    before = model.hidden(prompt)[0]
    close(ours(), before)
    for module in model.model.modules():
        if hasattr(module, "alpha_p"):
            module.beta.fill_(0.8)
    save_file({n: torch.tensor(0.8) if n.endswith(".beta") else tensor for n, tensor in stored.items()}, file)
    changed = run(model.model.base_model, prompt).last_hidden_state[0]
    assert not torch.allclose(changed, before, atol=1e-2)
    close(ours(), changed)
