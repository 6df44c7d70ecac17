"""Falcon, GPT-BigCode, BLOOM and MPT: settings that are refused, ALiBi's slopes and biases, stored names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.checkpoints import restore
from support.pages import Pages, close, load, scattered_tables
from support.published import (
    BLOOM_560M,
    FALCON_7B,
    FALCON_40B,
    FALCON_RW_1B,
    MPT_7B,
    STARCODERBASE,
    Read,
)
from torch import Tensor
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from engine.backends.attention.base import DistanceBias, PositionBias
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model.bias import BiasTable
from engine.model.families.alibi import slopes
from engine.model.positions import RoundedSlopes, Slopes

CPU = torch.device("cpu")


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (FALCON_RW_1B | {"num_kv_heads": 8}, "num_kv_heads is 8 and num_attention_heads 32.*must be equal"),
        (FALCON_40B | {"num_kv_heads": 7}, "num_attention_heads must be a multiple of num_kv_heads, got 128 and 7"),
        (FALCON_40B | {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn must be 1 or 2, got 3"),
        (FALCON_40B | {"parallel_attn": False}, "parallel_attn must be true with new_decoder_architecture"),
        (FALCON_7B | {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn may be 2 only with new_decoder"),
        (FALCON_7B | {"num_attention_heads": 70}, "4544 hidden features, which 70 attention heads cannot share"),
        (FALCON_7B | {"activation": "laplace"}, "'laplace'.*Implemented"),
        (BLOOM_560M | {"slow_but_exact": True, "pretraining_tp": 4}, "slow_but_exact with pretraining_tp 4"),
        (BLOOM_560M | {"num_attention_heads": 15}, "1024 hidden features, which 15 attention heads"),
        (MPT_7B | {"norm_type": "rmsnorm"}, "norm_type .* is 'rmsnorm'.*'low_precision_layernorm'"),
        (MPT_7B | {"attn_config": {"alibi": False}}, r"attn_config\.alibi .* is False"),
        (MPT_7B | {"attn_config": {"attn_type": "multiquery_attention"}}, r"attn_config\.attn_type .* is 'multiq"),
        (MPT_7B | {"attn_config": {"prefix_lm": True}}, r"attn_config\.prefix_lm .* is True"),
        (MPT_7B | {"attn_config": {"qk_ln": True}}, r"attn_config\.qk_ln .* is True"),
        (MPT_7B | {"attn_config": {"rope": True}}, r"attn_config\.rope .* is True"),
        (MPT_7B | {"attn_config": {"sliding_window_size": 64}}, r"attn_config\.sliding_window_size .* is 64"),
        (MPT_7B | {"d_model": 4100}, "4100 hidden features, which 32 attention heads"),
        (STARCODERBASE | {"n_head": 50}, "6144 hidden features, which 50 attention heads"),
        (STARCODERBASE | {"add_cross_attention": True, "multi_query": False}, "not implemented yet: cross-attention"),
    ],
)
def test_what_no_part_expresses_is_refused_by_name(values: dict[str, Any], message: str, read: Read) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(values)


# --- slopes and biases -------------------------------------------------------------------------------

HEADS = [*range(1, 41), 48, 56, 71, 112, 128]


@pytest.mark.parametrize("heads", HEADS)
def test_slopes_equal_transformers(heads: int) -> None:
    ours = torch.tensor(slopes(heads))
    # A step of one position is the slope.
    bloom = modeling_bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)
    torch.testing.assert_close(ours, bloom[:, 0, 1], rtol=1e-6, atol=0)
    mpt = modeling_mpt.build_mpt_alibi_tensor(heads, 2)
    torch.testing.assert_close(torch.tensor(slopes(heads)), -mpt[:, 0, 0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("heads", HEADS)
def test_rounded_slopes_equal_transformers_to_the_bit(heads: int) -> None:
    theirs = modeling_falcon.build_alibi_tensor(torch.ones(1, 2048, dtype=torch.long), heads, torch.float32)
    bias = BiasTable(RoundedSlopes(slopes(heads)), 2048, CPU)()
    assert isinstance(bias, PositionBias)
    assert torch.equal(bias.table, theirs[:, 0])


def test_rounding_shows_beyond_256_positions() -> None:
    bias = BiasTable(RoundedSlopes(slopes(4), 0.25), 600, CPU)()
    steps = bias.table.diff(dim=1)
    exact = torch.tensor(slopes(4))[:, None] * 0.25
    assert torch.equal(steps[:, :256], exact.expand(4, 256))
    assert set(steps[0, 256:].tolist()) == {0.0, 2 * exact[0].item()} | {4 * exact[0].item()}


def test_a_bias_by_distance_is_that_by_position_but_for_a_constant() -> None:
    """Which softmax takes no notice of."""
    length, heads = 50, 6
    bias = BiasTable(Slopes(slopes(heads)), length, CPU)()
    assert isinstance(bias, DistanceBias)
    theirs = modeling_bloom.build_alibi_tensor(torch.ones(1, length), heads, torch.float32)[:, 0]
    for query in (0, 7, 49):
        ours = bias.table[:, torch.arange(query + 1) - query + bias.zero]
        torch.testing.assert_close(ours, theirs[:, : query + 1] - theirs[:, query : query + 1])


# --- stored names ------------------------------------------------------------------------------------

TINY: dict[str, dict[str, Any]] = {
    "FalconForCausalLM": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4},
    "GPTBigCodeForCausalLM": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "BloomForCausalLM": {"hidden_size": 16, "n_layer": 2, "n_head": 4},
    "MptForCausalLM": {"d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
}
BUFFERS = {
    "FalconForCausalLM": ("h.1.self_attention.maybe_rotary.inv_freq", "h.0.self_attention.rotary_emb.inv_freq"),
    "GPTBigCodeForCausalLM": ("bias", "h.0.attn.bias", "h.1.attn.masked_bias"),
    "BloomForCausalLM": ("h.0.self_attention.scale_mask_softmax.causal_mask",),
}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


def make(architecture: str, folder: Path, **changes: Any) -> Any:
    """A tiny model with random weights, saved; transformers' own first values are nearly zero."""
    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(vocab_size=31, **(TINY[architecture] | changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return model


def logits(folder: Path) -> Tensor:
    model = load(folder)
    (hidden,) = Pages(model, scattered_tables([len(PROMPT)])).step([PROMPT])
    with torch.inference_mode():
        return model.logits(hidden)


def reference(model: Any) -> Tensor:
    with torch.no_grad():
        answer: Tensor = model(torch.tensor([PROMPT])).logits[0]
    return answer


@pytest.mark.parametrize("architecture", TINY)
def test_names_without_prefix_and_stored_buffers_load(architecture: str, tmp_path: Path) -> None:
    """As BLOOM is published, under either name of the architecture; and with what older code stored."""
    model = make(architecture, tmp_path)
    expected = reference(model)
    close(logits(tmp_path), expected)

    def headless(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        short = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        assert not short.keys() & tensors.keys()
        return short | {name: torch.ones(2) for name in BUFFERS.get(architecture, ())}

    restore(tmp_path, headless)
    close(logits(tmp_path), expected)
    restore(tmp_path, dict, architectures=[architecture.removesuffix("ForCausalLM") + "Model"])
    close(logits(tmp_path), expected)


@pytest.mark.parametrize("architecture", TINY)
def test_a_stored_head_of_its_own_is_used(architecture: str, tmp_path: Path) -> None:
    model = make(architecture, tmp_path, tie_word_embeddings=False)
    restore(tmp_path, dict, tie_word_embeddings=True)
    close(logits(tmp_path), reference(model))


@pytest.mark.parametrize(("alibi", "kinds"), [(False, ("sdpa", "eager")), (True, ("sdpa",))])
def test_falcon_equals_the_attentions_of_the_reference(alibi: bool, kinds: tuple[str, ...], tmp_path: Path) -> None:
    """With ALiBi the "eager" one is no reference: it adds the bias to the scores and, with the mask, once more."""
    for kind in kinds:
        model = make("FalconForCausalLM", tmp_path, alibi=alibi, attn_implementation=kind)
        assert model.config._attn_implementation == kind
        close(logits(tmp_path), reference(model))


BAND = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("linear", {"factor": 3.0}),
        ("dynamic", {"factor": 3.0}),
        ("llama3", BAND),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 8}),
    ],
)
def test_falcon_turns_by_scaled_frequencies(kind: str, values: dict[str, Any], tmp_path: Path) -> None:
    """The reference has met 40 tokens, the longest that ours is loaded for; it was made for 8."""
    rope = {"rope_type": kind, "rope_theta": 1e4} | values
    model = make("FalconForCausalLM", tmp_path, hidden_size=32, max_position_embeddings=8, rope_parameters=rope)
    with torch.no_grad():
        model(torch.ones(1, 40, dtype=torch.long))
    expected = reference(model)
    close(logits(tmp_path), expected)
    restore(tmp_path, dict, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    with pytest.raises(AssertionError):
        close(logits(tmp_path), expected)


def test_mpt_is_what_the_reference_makes_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers computes ALiBi for a maximum of 8 whatever the config says, and does not scale logits."""
    expected = reference(make("MptForCausalLM", tmp_path, attn_config={"alibi_bias_max": 3}, logit_scale=0.3))
    close(logits(tmp_path), expected)
    assert "attn_config.alibi_bias_max to 3: transformers computes this architecture as if it were 8" in caplog.text
    assert "logit_scale to 0.3: transformers" in caplog.text


@pytest.mark.parametrize("name", ["transformer.wpe.weight", "transformer.blocks.0.attn.Wqkv.bias"])
def test_mpt_with_tensors_that_the_reference_passes_over_is_refused(name: str, tmp_path: Path) -> None:
    """Learned positions, biases: transformers leaves them out without a word in the config."""
    make("MptForCausalLM", tmp_path, no_bias=False)
    restore(tmp_path, lambda tensors: tensors | {name: torch.ones(3)})
    with pytest.raises(ModelLoadError, match=f"has tensors that do not match its config: {name}"):
        load(tmp_path)
