"""The program of a stack: what is in it, and the operations that later features fill."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.checkpoints import make_checkpoint, random_prompt
from support.families import FAMILY_SHAPES, make_family_checkpoint
from support.pages import Pages, close, load, scattered_tables
from support.seq2seq import make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES as SEQ2SEQ_SHAPES
from torch import Tensor

from engine.backends.native.attention import NativeAttention
from engine.backends.native.memory import Arena
from engine.backends.native.ranks import Ranks
from engine.backends.torch.attention import TorchReference
from engine.model.adapters import LowRank
from engine.model.attention_operations import Attend, PrepareHeads, StoreEncoded
from engine.model.inputs import Inputs
from engine.model.operations import AddAdapters, AllReduce, Embed, MixExperts, Multiply
from engine.model.program import last_uses
from engine.model.transformer import Transformer

RANK = 3
PROMPTS = [random_prompt(60, seed, length) for seed, length in enumerate((5, 9))]


def answers(model: Transformer, slots: Tensor | None = None) -> list[Tensor]:
    """Hidden states of both prompts in one step, whose tokens have these slots of adapters."""
    assert model.decoder is not None
    run = model.decoder.executor.run

    class WithAdapters:
        def run(self, inputs: Inputs) -> Tensor:
            return run(replace(inputs, sides={"adapter_slots": slots} if slots is not None else {}))

    kept, model.decoder.executor = model.decoder.executor, WithAdapters()
    try:
        return Pages(model, scattered_tables([len(prompt) for prompt in PROMPTS])).step(PROMPTS)
    finally:
        model.decoder.executor = kept


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["llama", "gptj", "gemma2", "mixtral", "deepseek-v2", "bloom", "olmo2"])
def test_adapters_add_to_the_products_of_their_rows_alone(tmp_path: Path, name: str, packed: bool) -> None:
    path = make_family_checkpoint(FAMILY_SHAPES[name], tmp_path).path
    model, changed = load(path, backend=NativeAttention() if packed else None), load(path)
    model.take_adapters(2, RANK)
    assert model.decoder is not None
    assert changed.decoder is not None
    products = [operation.linear for operation in model.decoder.program.operations if isinstance(operation, Multiply)]
    others = [operation.linear for operation in changed.decoder.program.operations if isinstance(operation, Multiply)]
    if packed:
        model.pack()
    slots = torch.tensor([0] * len(PROMPTS[0]) + [2] * len(PROMPTS[1]))
    plain = answers(model)
    generator = torch.Generator().manual_seed(0)
    for linear, other in zip(products, others, strict=True):
        assert linear.adapters is not None
        down = torch.randn(RANK, linear.inputs, generator=generator)
        up = 0.1 * torch.randn(linear.outputs, RANK, generator=generator)
        linear.adapters.put(2, linear.adapters.lay_out(LowRank(down, up), Arena()))
        other.weight.data += up @ down
    assert len(products) >= 2 * len(model.spec.trunk.blocks)
    found = answers(model, slots)
    close(found[0], plain[0])
    # torch multiplies the rows of an expert together, whose number depends on the other row.
    assert torch.equal(found[0], plain[0]) or (name == "deepseek-v2" and not packed)
    close(found[1], answers(changed)[1])
    assert not torch.allclose(found[1], plain[1], atol=1e-2)


def kinds(model: Transformer, name: str = "decoder") -> Counter[type]:
    return Counter(map(type, getattr(model, name).program.operations))


def of_ranks(model: Transformer) -> Transformer:
    """The same model, with ranks that divide it."""
    return Transformer(model.spec, TorchReference(), 16, device="meta", ranks=mock.create_autospec(Ranks))


def test_operations_of_a_decoder(tmp_path: Path) -> None:
    model = load(make_checkpoint("llama-grouped", tmp_path).path)
    layers = len(model.spec.trunk.blocks)
    found = kinds(model)
    assert found[Embed] == 1
    assert found[Multiply] == found[AddAdapters] == 4 * layers
    assert found[PrepareHeads] == found[Attend] == layers
    assert found[AllReduce] == 0
    assert kinds(of_ranks(model))[AllReduce] == 2 * layers, "after attention and after the feed-forward network"
    assert not found[StoreEncoded]


def test_every_product_is_followed_by_its_adapters(tmp_path: Path) -> None:
    for model in (
        load(make_family_checkpoint(FAMILY_SHAPES["gptj"], tmp_path / "parallel").path),
        load(make_seq2seq_checkpoint(SEQ2SEQ_SHAPES["bart"], tmp_path / "bart").path),
    ):
        for stack in (model.encoder, model.decoder):
            if stack is None:
                continue
            operations = stack.program.operations
            products = [i for i, one in enumerate(operations) if isinstance(one, Multiply)]
            assert products
            for i in products:
                product, adapters = operations[i : i + 2]
                assert isinstance(product, Multiply)
                assert isinstance(adapters, AddAdapters)
                assert (adapters.linear, adapters.x, adapters.out) == (product.linear, product.x, product.out)


def test_experts_are_summed_over_devices_like_others(tmp_path: Path) -> None:
    model = load(make_family_checkpoint(FAMILY_SHAPES["mixtral"], tmp_path).path)
    layers = len(model.spec.trunk.blocks)
    found = kinds(model)
    assert found[MixExperts] == layers
    assert kinds(of_ranks(model))[AllReduce] == 2 * layers


def test_an_encoder_stores_what_each_layer_of_the_decoder_reads(tmp_path: Path) -> None:
    model = load(make_seq2seq_checkpoint(SEQ2SEQ_SHAPES["bart"], tmp_path).path)
    assert model.decoder is not None
    operations = [one for one in model.encoder.program.operations if isinstance(one, StoreEncoded)]  # type: ignore[union-attr]
    assert [one.layer for one in operations] == list(range(len(model.decoder.blocks)))
    across = [one for one in model.decoder.program.operations if isinstance(one, Attend) and one.is_cross]
    assert [one.layer for one in across] == [one.layer for one in operations]


def test_rows_are_let_go_after_their_last_use(tmp_path: Path) -> None:
    """Nothing is read that was let go, and what is let go is not read again before it is written."""
    for name in ("gptj", "gemma3", "mixtral"):
        model = load(make_family_checkpoint(FAMILY_SHAPES[name], tmp_path / name).path)
        assert model.decoder is not None
        program = model.decoder.program
        uses = last_uses(program.operations, program.result)
        held: set[int] = set()
        most = 0
        for operation, dead in zip(program.operations, uses, strict=True):
            assert {rows.buffer for rows in operation.reads} <= held
            held |= {rows.buffer for rows in operation.writes}
            most = max(most, len(held))
            assert held.issuperset(dead)
            held -= set(dead)
        assert held == {program.result.buffer}
        assert most < len(program.widths)
