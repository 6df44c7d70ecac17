"""Layers run as one call of the library: every family gives what single kernels give, bit for bit, and is run so."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.checkpoints import SHAPES as PLAIN_SHAPES
from support.checkpoints import make_checkpoint, random_prompt
from support.driving import Job, make_engine, run
from support.encoders import ENCODER_SHAPES, make_encoder_checkpoint
from support.everyday import everyday
from support.executors import by_single_kernels, by_torch, counted, stacks_of, use_torch
from support.families import FAMILY_SHAPES, make_family_checkpoint
from support.native import each_amx, each_isa, kernels_of, needs_native
from support.pages import BLOCK, Pages, close, load, scattered_tables
from support.seq2seq import make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES as SEQ2SEQ_SHAPES
from torch import Tensor

from engine import SamplingParams
from engine.backends.attention.base import AttentionMetadata
from engine.backends.attention.selection import select
from engine.backends.native import gemm
from engine.backends.native import program as programs
from engine.backends.native.attention import NativeAttention
from engine.backends.torch.attention import TorchReference
from engine.model import checkpoint, families, packing, spec
from engine.model.activations import ACTIVATIONS
from engine.model.executors import native as native_executor
from engine.model.executors import native_rows
from engine.model.executors.native import NativeExecutor
from engine.model.executors.reference import TorchExecutor
from engine.model.experts import ExpertMatrices, ExpertsFeedForward
from engine.model.heads import Head
from engine.model.inputs import Inputs
from engine.model.layers import Linear
from engine.model.quantisation import Quantization
from engine.model.transformer import Transformer

pytestmark = needs_native

DECODERS = [name for name, shape in FAMILY_SHAPES.items() if shape.architecture in families.supported()]
HEADS = [
    name
    for name, shape in ENCODER_SHAPES.items()
    if shape.architecture.endswith(("MaskedLM", "SequenceClassification"))
]
LENGTHS = (11, 30, 4, 1, 7)
VOCABULARY = 60


@dataclass(frozen=True)
class Subject:
    """A tiny random checkpoint."""

    name: str
    path: Path

    def load(self, dtype: torch.dtype, quantization: Quantization | None = None) -> Transformer:
        model = load(self.path, dtype, max_model_len=40, backend=NativeAttention())
        model.pack(quantization)
        return model


@pytest.fixture(scope="module", params=[*PLAIN_SHAPES, *everyday([*DECODERS, *SEQ2SEQ_SHAPES])])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Each shape in turn."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    if name in PLAIN_SHAPES:
        return Subject(name, make_checkpoint(name, folder).path)
    if name in DECODERS:
        return Subject(name, make_family_checkpoint(FAMILY_SHAPES[name], folder).path)
    return Subject(name, make_seq2seq_checkpoint(SEQ2SEQ_SHAPES[name], folder).path)


@pytest.fixture(autouse=True)
def same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has some activations to itself otherwise, and bfloat16 on CPUs with matrix tiles; only the library tells
    short inputs from long ones, which tiles multiply."""
    monkeypatch.setattr(native_rows, "PLAIN", frozenset(ACTIVATIONS))
    monkeypatch.setattr(native_rows, "GATED", frozenset(ACTIVATIONS))
    monkeypatch.setattr(packing, "_native_is_best", lambda dtype, amx: dtype in (torch.float32, torch.bfloat16))
    monkeypatch.setattr(gemm, "has_amx", lambda: False)


def hidden_states(model: Transformer, padding: int) -> list[Tensor]:
    """Of prompts in two chunks, then of a token each; and last all keys and values that were written."""
    prompts = [random_prompt(VOCABULARY, seed, length) for seed, length in enumerate(LENGTHS)]
    reach = [length + 1 for length in LENGTHS]
    pages = Pages(model, scattered_tables(reach), more=64, reach=reach)
    if model.encoder is not None:
        first = int(pages.tables.max()) + 1
        inputs = [random_prompt(VOCABULARY, 9 + seed, 3 + 2 * seed) for seed in range(len(LENGTHS))]
        pages.encode(inputs, [[first + 4 * row + page for page in range(4)] for row in range(len(inputs))])
    steps = [[p[: len(p) // 2] for p in prompts], [p[len(p) // 2 :] for p in prompts], [[5]] * len(prompts)]
    rows = [row for chunks in steps for row in pages.step(chunks, padding=padding)]
    assert all(row.isfinite().all() for row in rows), "NaN would equal NaN"
    return rows + [tensor for cache in pages.caches for tensor in (cache.keys, cache.values)] + pages.states


def both_ways(model: Transformer, padding: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    passes = 3 + (model.encoder is not None)
    with counted() as runs:
        ours = hidden_states(model, padding)
        assert runs.call_count == passes
        with by_single_kernels(model):
            theirs = hidden_states(model, padding)
        assert runs.call_count == passes
    return zip(ours, theirs, strict=True)


def equal(pairs: Iterator[tuple[Tensor, Tensor]]) -> None:
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def agree(model: Transformer, padding: int = 0) -> None:
    """Both executors give the same bits, but for experts' weights, whose exponentials are summed otherwise, for
    recurrences, whose sums and functions are, and for the openings of heads."""
    blocks = model.spec.trunk.blocks
    carrying = (
        spec.DeltaRule
        | spec.SelectiveScan
        | spec.ChannelScan
        | spec.GatedRecurrence
        | spec.FadingAttention
        | spec.FeatureDelta
    )
    delta = any(isinstance(block.mixing, carrying) or block.attention.gate is not None for block in blocks)
    if not delta and not any(isinstance(block.ffn, spec.Experts | spec.Shared) for block in blocks):
        equal(both_ways(model, padding))
        return
    packed = [one.packed for one in model.modules() if isinstance(one, Linear) and one.packed]
    packed += [one for module in model.modules() if isinstance(module, ExpertMatrices) for one in module.packed]
    exact = all(one.native.kind == "float32" for one in packed)
    for ours, theirs in both_ways(model, padding):
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        difference = (ours - theirs).float().nan_to_num(0.0).norm()
        most = (1e-5 if exact else 3e-2) if delta else (1e-6 if exact else 1e-2)
        assert difference <= most * theirs.float().nan_to_num(0.0).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_and_pages_are_those_of_single_kernels(subject: Subject, dtype: torch.dtype) -> None:
    agree(subject.load(dtype))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_and_padding(subject: Subject, quantization: Quantization) -> None:
    agree(subject.load(torch.bfloat16, quantization), padding=3)


def test_a_sequence_begins_at_its_first_token_wherever_its_angles_are(tmp_path: Path) -> None:
    """Angles of short sequences are in other rows of the table, and a gated recurrence begins at position 0."""
    make_family_checkpoint(FAMILY_SHAPES["recurrent-gemma"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "dynamic", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 20}))
    model = Subject("recurrent-gemma", tmp_path).load(torch.float32)
    assert model.rotary_shifts == ((20, 40),)
    agree(model)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A grouped-query model."""
    return Subject("llama", make_checkpoint("llama-grouped", tmp_path_factory.mktemp("llama")).path)


@pytest.mark.parametrize("threads", [1, 2])
@each_isa
def test_every_instruction_set_and_number_of_threads(llama: Subject, isa: str, threads: int) -> None:
    with kernels_of(isa, threads):
        model = load(llama.path, torch.float32, max_model_len=40, backend=NativeAttention())
        model.pack("int8")  # whose kernels are used whatever the instruction set
        equal(both_ways(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("up", "down"), [("int4", "int8"), ("int4", None), (None, "int4")])
@each_isa
def test_experts_whose_matrices_are_of_two_kinds(
    isa: str, up: Quantization | None, down: Quantization | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    """As where a checkpoint stores them so: of Q4_K_M those that lead back have more bits in some layers."""
    make_family_checkpoint(FAMILY_SHAPES["qwen3-moe"], tmp_path)
    with kernels_of(isa, 2):
        model = load(tmp_path, dtype, max_model_len=40, backend=NativeAttention())
        mixtures = [module for module in model.modules() if isinstance(module, ExpertsFeedForward)]
        for module in mixtures:
            module.up.pack(up)
            module.down.pack(down)
        model.pack()
        kinds = [{one.native.kind for one in half.packed} for half in (mixtures[0].up, mixtures[0].down)]
        assert kinds[0] != kinds[1]
        agree(model)


@each_amx
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("family", [None, "qwen3-moe"])
def test_few_bits_by_matrix_tiles(
    llama: Subject,
    isa: str,
    family: str | None,
    quantization: Quantization,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They change no bit, in steps of many rows and of few, and with experts."""
    subject = llama
    if family is not None:
        subject = Subject(family, make_family_checkpoint(FAMILY_SHAPES[family], tmp_path).path)
    monkeypatch.setattr(gemm, "has_amx", lambda: True)
    with kernels_of(isa, 2):
        states = []
        for tiles in (True, False):
            monkeypatch.setattr(gemm, "_tiles_are_faster", lambda library, bits, tiles=tiles: tiles)
            model = subject.load(torch.float32, quantization)
            kinds = {one.packed.native.kind for one in model.modules() if isinstance(one, Linear) and one.packed}
            assert any(kind.startswith("amx_") for kind in kinds) == tiles
            states.append(hidden_states(model, 3))
        equal(iter(zip(*states, strict=True)))


def test_steps_of_all_sizes_share_buffers(llama: Subject) -> None:
    """A large step makes room, and nothing of it is left in a small one."""
    model = llama.load(torch.float32)
    alone = hidden_states(model, 0)
    hidden_states(model, 300)
    again = hidden_states(model, 0)
    equal(iter(zip(again, alone, strict=True)))


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float16", "int8"])
def test_tokens_with_pages_of_every_format(llama: Subject, cache_dtype: str) -> None:
    jobs = [Job(random_prompt(VOCABULARY, n, n), SamplingParams(temperature=0.0, max_tokens=12)) for n in LENGTHS]
    with counted() as runs:
        ours = run(make_engine(llama.path, kv_cache_dtype=cache_dtype), jobs)
    assert runs.call_count > 12
    engine = make_engine(llama.path, kv_cache_dtype=cache_dtype)
    use_torch(engine.runner.model)
    assert run(engine, jobs) == ours


def test_a_watched_step_says_where_its_time_went(llama: Subject) -> None:
    model = llama.load(torch.float32)
    assert model.decoder is not None
    assert isinstance(model.decoder.executor, NativeExecutor)
    program, seen = model.decoder.executor.native, []
    unseen = hidden_states(model, 0)
    program.watch = seen.append
    equal(iter(zip(hidden_states(model, 0), unseen, strict=True)))
    assert len(seen) == 3, "one for each step"
    layers = len(model.spec.trunk.blocks)
    for step in seen:
        names = [name for name, _, _ in step]
        assert names.count("attention") == names.count("rotation and pages") == layers
        assert names.count("norm") == 2 * layers + 1
        assert len([name for name in names if name.startswith("product")]) == 4 * layers
        assert all(work >= 0 and wait >= 0 for _, work, wait in step)
        assert sum(work for _, work, _ in step) > 0


def test_formats_and_attentions_without_kernels_are_left_to_torch(llama: Subject) -> None:
    for dtype, backend in ((torch.float16, NativeAttention()), (torch.float32, TorchReference())):
        model = load(llama.path, dtype, max_model_len=40, backend=backend)
        model.pack()
        assert model.decoder is not None
        assert isinstance(model.decoder.executor, TorchExecutor)


def test_engines_run_layers_so(subject: Subject) -> None:
    engine = make_engine(subject.path)
    assert all(isinstance(stack.executor, NativeExecutor) for stack in stacks_of(engine.runner.model))
    assert engine.runner.model.decoder is not None
    buffers, pages = weakref.ref(engine.runner.model.decoder), weakref.ref(engine.runner.cache.layers[0][0])
    engine.close()
    assert buffers() is None
    assert pages() is None, "the addresses of pages are known, and keep nothing alive"


@pytest.mark.parametrize("padding", [0, 3])
def test_a_step_without_tokens(llama: Subject, padding: int) -> None:
    model = llama.load(torch.float32)
    pages = Pages(model, scattered_tables([8]))
    assert [len(row) for row in pages.step([[]], padding=padding)] == [0], "before there were any buffers"
    pages.step([[1, 2, 3]])
    assert [len(row) for row in pages.step([[]], padding=padding)] == [0]


def step(pages: Pages, position: int, slot: int) -> None:
    metadata = AttentionMetadata.build([1], [4], torch.device("cpu"))
    pages.model(
        Inputs(
            token_ids=torch.tensor([1]),
            positions=torch.tensor([position]),
            metadata=metadata,
            tokens=1,
            caches=pages.caches,
            slots=torch.tensor([slot]),
        )
    )


@pytest.mark.parametrize("position", [-1, 40, 2**40])
def test_positions_without_angles_are_refused(llama: Subject, position: int) -> None:
    pages = Pages(llama.load(torch.float32), scattered_tables([8]))
    with pytest.raises(IndexError, match="position"):
        step(pages, position, 7)
    assert pages.caches[0].keys.isnan().all(), "nothing was written"


@pytest.mark.parametrize("slot", [-1, 12, 2**40])
def test_slots_outside_the_cache_are_refused(llama: Subject, slot: int) -> None:
    pages = Pages(llama.load(torch.float32), scattered_tables([8]))
    assert len(pages.caches[0].keys) * BLOCK == 12
    with pytest.raises(IndexError, match="slot"):
        step(pages, 3, slot)
    assert pages.caches[0].keys.isnan().all(), "nothing was written"


def test_positions_that_lie_apart(llama: Subject) -> None:
    model = llama.load(torch.float32)
    wanted, plain = hidden_states(model, 0), model.forward

    def forward(inputs: Inputs) -> Tensor:
        positions = inputs.positions.long()
        return plain(replace(inputs, positions=torch.stack((positions, positions + 9), 1)[:, 0]))

    with mock.patch.object(model, "forward", forward):
        equal(iter(zip(hidden_states(model, 0), wanted, strict=True)))


def test_memory_that_runs_out_while_buffers_grow(llama: Subject) -> None:
    """The next step finds no buffers that are too small."""
    model = llama.load(torch.float32)
    wanted = hidden_states(model, 300)
    model = llama.load(torch.float32)
    hidden_states(model, 0)
    real, left = torch.empty, [3]

    def empty(*shape: Any, **how: Any) -> Tensor:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("not enough memory")
        return real(*shape, **how)

    with mock.patch.object(programs, "torch", SimpleNamespace(**vars(torch) | {"empty": empty})):
        with pytest.raises(RuntimeError, match="not enough"):
            hidden_states(model, 300)
        assert left[0] == 0
        equal(iter(zip(hidden_states(model, 300), wanted, strict=True)))


def test_pages_outside_the_cache_are_refused(llama: Subject) -> None:
    model = llama.load(torch.float32)
    pages = Pages(model, scattered_tables([8]))
    pages.step([[1, 2, 3]])
    pages.tables[0, 0] = 1000
    with pytest.raises(IndexError, match="keys lie outside the pages"):
        step(pages, 3, 7)
    pages.tables[0, 0] = 1
    step(pages, 3, 7)


# ---------------------------------------------------------------- encoders


def read(model: Transformer, padding: int = 0) -> Tensor:
    """Hidden states of several inputs."""
    ids = torch.tensor(random_prompt(model.vocab_size, 3, sum(LENGTHS)) + [0] * padding)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    with torch.inference_mode():
        hidden: Tensor = model(
            Inputs(
                token_ids=ids,
                positions=torch.cat([positions, positions.new_zeros(padding)]),
                metadata=AttentionMetadata.build(list(LENGTHS), list(LENGTHS), torch.device("cpu")),
                tokens=sum(LENGTHS),
            )
        )
        return hidden[: sum(LENGTHS)]


@pytest.fixture(
    scope="module",
    params=everyday(name for name, shape in ENCODER_SHAPES.items() if shape.architecture.endswith("Model")),
)
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each shape of an encoder in turn."""
    return make_encoder_checkpoint(ENCODER_SHAPES[request.param], tmp_path_factory.mktemp("encoder")).path


@pytest.mark.parametrize(("dtype", "quantization"), [(torch.float32, None), (torch.bfloat16, "int8")])
def test_hidden_states_of_encoders(encoder: Path, dtype: torch.dtype, quantization: Quantization | None) -> None:
    """Where attention or a convolution has no kernel, torch computes it on the library's rows."""
    config = checkpoint.read_config(encoder)
    parts = families.build_spec(config).trunk.attentions
    backend = select(torch.device("cpu"), parts, None)
    model = load(encoder, dtype, max_model_len=40, backend=backend)
    model.pack(quantization)
    with counted() as runs:
        found = [read(model), read(model, padding=3)]
    assert runs.call_count == 2
    with by_single_kernels(model):
        equal(iter(zip(found, [read(model), read(model, padding=3)], strict=True)))
    assert found[0].isfinite().all()


@each_amx
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_of_encoders_by_matrix_tiles(
    encoder: Path, isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 torch's executor multiplies short inputs by tiles, too. MobileBERT's numbers are large, and so are
    the differences that rounding makes, between instruction sets as well."""
    monkeypatch.setattr(gemm, "has_amx", lambda: True)
    with kernels_of(isa, torch.get_num_threads()):
        model = load(encoder, dtype, max_model_len=40, backend=NativeAttention())
        model.pack()
        kinds = {one.packed.native.kind for one in model.modules() if isinstance(one, Linear) and one.packed}
        assert (f"amx_{dtype}".replace("torch.", "") in kinds) == any(
            one.inputs % 32 == 0 for one in model.encoder.modules() if isinstance(one, Linear)
        )
        found = [read(model), read(model, padding=3)]
        with by_single_kernels(model):
            for ours, theirs in zip(found, [read(model), read(model, padding=3)], strict=True):
                if dtype == torch.bfloat16:
                    assert torch.equal(ours, theirs)
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5 * float(theirs.abs().max()))


def test_layers_with_disentangled_attention_and_a_convolution_are_one_call(tmp_path: Path) -> None:
    path = make_encoder_checkpoint(ENCODER_SHAPES["deberta-v2"], tmp_path).path
    model = load(path, max_model_len=40, backend=NativeAttention())
    model.pack()
    with mock.patch.object(programs.Program, "run", autospec=True, side_effect=programs.Program.run) as ran:
        read(model)
    assert ran.call_count == 1


@pytest.mark.parametrize("name", everyday(HEADS))
def test_heads_are_one_call_before_their_last_matrix(name: str, tmp_path: Path) -> None:
    model = load(
        make_encoder_checkpoint(ENCODER_SHAPES[name], tmp_path).path, max_model_len=40, backend=NativeAttention()
    )
    model.pack()
    hidden = read(model)
    assert isinstance(model.head, Head)
    with mock.patch.object(programs.Program, "run", autospec=True, side_effect=programs.Program.run) as ran:
        found = [model.logits(hidden), model.logits(hidden[2:5])]
    assert ran.call_count == (2 if len(model.head.program.operations) > 1 else 0)
    assert torch.equal(found[0][2:5], found[1])
    with by_torch(model):
        close(found[0], model.logits(hidden))


def test_what_torch_computes_between_two_calls_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_encoder_checkpoint(ENCODER_SHAPES["deberta-v2"], tmp_path).path
    model = load(path, max_model_len=40, backend=NativeAttention())
    with caplog.at_level("INFO", "octavo.model"), mock.patch.object(native_executor, "FUNCTIONS", ()):
        model.pack()
        read(model)
    said = [record.message for record in caplog.records if "torch computes these parts" in record.message]
    assert len(said) == 1
    assert "has no kernel" in said[0]
