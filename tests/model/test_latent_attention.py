"""Attention over latents: what pages hold of a token, and what 8 bits change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from support import reference
from support.driving import Job, add, finish, make_engine
from support.families import FAMILY_SHAPES, FamilyCheckpoint, make_family_checkpoint
from torch import Tensor

from engine import SamplingParams
from engine.backends.attention.formats import PageShape, format_named, quantise, vector_bytes
from engine.execution.kv_cache import page_bytes
from engine.model.missing import unsupported
from engine.model.normalisation import Norm
from engine.model.spec import (
    Attention,
    Block,
    Gated,
    Latent,
    ModelSpec,
    Pool,
    Post,
    Stack,
    Tokens,
)


def test_an_encoder_with_latents_is_refused() -> None:
    norm = Norm("rms", 1e-6)
    latent = Latent(width=8, rotary=4, content=4, values=4, norm=norm)
    attention = Attention(heads=2, kv_heads=1, head_dim=12, scale=0.5, causal=False, latent=latent)
    block = Block(placement=Post(norm, norm), attention=attention, ffn=Gated(8, "silu"))
    stack = Stack(hidden_size=8, embedding=Tokens(vocab_size=9, width=8), blocks=(block,), final_norm=None)
    assert unsupported(ModelSpec(encoder=stack, decoder=None, head=Pool())) == ["latent attention outside a decoder"]


# ------------------------------------------------------------------ pages


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> FamilyCheckpoint:
    return make_family_checkpoint(FAMILY_SHAPES["deepseek-v3"], tmp_path_factory.mktemp("latent"))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "fp8"])
def test_a_token_takes_its_latent_and_the_shared_key(name: str, model: FamilyCheckpoint) -> None:
    """In each layer one vector, whatever the heads are."""
    one = make_engine(model.path, kv_cache_dtype=name, block_size=4)
    dtype, settings = format_named(name), model.shape.settings
    width = settings["kv_lora_rank"] + settings["qk_rope_head_dim"]
    assert one.runner.model.kv_shapes() == [PageShape(1, width, 1)] * settings["num_hidden_layers"]
    size = page_bytes(one.runner.model.kv_shapes(), 4, dtype)
    assert size == 4 * settings["num_hidden_layers"] * vector_bytes(width, dtype)
    tensors = [tensor for layer in one.runner.cache.layers for tensor in layer]
    assert sum(tensor[0].nbytes for tensor in tensors) == size
    assert one.runner.cache.key_centres == [None] * settings["num_hidden_layers"]
    one.close()


class Narrow(transformers.DynamicCache):
    """transformers' cache of latents and shared keys, rounding both of a token together as pages of a format do."""

    def __init__(self, name: str):
        super().__init__()
        self.dtype = format_named(name)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        both = torch.cat((key_states, value_states), dim=-1)
        steps, scales = quantise(both, self.dtype)
        rounded = steps.float() * scales.float().unsqueeze(-1)
        return super().update(*rounded.split((key_states.shape[-1], value_states.shape[-1]), -1), layer_idx)


@pytest.fixture(params=["int8", "fp8"])
def rounded(request: pytest.FixtureRequest, model: FamilyCheckpoint) -> Iterator[tuple[str, Any]]:
    one = make_engine(model.path, kv_cache_dtype=request.param, max_num_batched_tokens=16, max_num_seqs=8, block_size=4)
    yield request.param, one
    one.close()


def test_greedy_equals_transformers_with_latents_of_8_bits(rounded: tuple[str, Any], model: FamilyCheckpoint) -> None:
    """Token for token, with chunked prompts; and rounding latents so does change what the model says."""
    name, one = rounded
    prompts = model.prompts()
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
    for number, ids in enumerate(prompts):
        add(one, str(number), Job(ids, params))
    outputs = finish(one)
    changes = []
    for number, ids in enumerate(prompts):
        expected = reference.greedy(model.model, ids, None, 12, past_key_values=Narrow(name))
        answer = outputs[str(number)].outputs[0]
        assert answer.token_ids == expected.answers[0].tokens
        rows = reference.logprobs(model.model, [*ids, *answer.token_ids])[len(ids) - 1 : -1]
        got = [next(iter(entry.values())).logprob for entry in answer.logprobs or ()]
        changes += [abs(row[t].item() - have) for row, t, have in zip(rows, answer.token_ids, got, strict=True)]
    # Where another expert is chosen, a number or two may be far off.
    assert 1e-4 < sorted(changes)[len(changes) // 2] < 0.3
