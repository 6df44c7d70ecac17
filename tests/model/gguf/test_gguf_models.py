"""Models in GGUF files: tokens are those of transformers with the numbers that the file holds."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import reference
from support.blocks import numbers
from support.checkpoints import random_prompt
from support.driving import Job, finish, logprobs, make_engine, run
from support.gguf_files import EMBEDDING, KINDS, dense_matrices, library, put, write_file
from support.native import each_isa, kernels_of, needs_native
from support.reference import MIN_MARGIN
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from cli.main import main
from engine import PoolingParams, SamplingParams, quantise_checkpoint
from engine.backends.native import gemm
from engine.backends.native.gguf import count_infinite
from engine.config import EngineConfig
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.execution import loading, starting
from engine.inspection import PROCESS, STARTING, inspect_model
from engine.model import checkpoint, quantised_loading
from engine.model.embedding import TokenEmbedding
from engine.model.gguf import blocks
from engine.model.gguf import folder as folders
from engine.model.gguf.blocks import as_quantised, dequantise, find_format, numbers_of
from engine.model.gguf.folder import stand_in
from engine.model.gguf.model_types import MODEL_TYPES
from engine.model.gguf.tensors import StoredRows
from engine.model.gguf.weights import GgufWeights
from engine.model.layers import Linear
from engine.model.quantisation import Parts
from engine.model.weight_files import Checkpoint
from server.facts import log_facts

ORACLE = Path(sys.prefix) / "clients" / "quantised"  # tools/setup.py puts it there
FORMATS = ("Q8_0", "Q4_0", "Q5_1", "BF16")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def gguf() -> Iterator[Any]:
    with library(ORACLE) as module:
        yield module


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(folders, "cache_folder", lambda name: place / name)
    return place / "gguf"


@pytest.fixture(scope="module")
def llama(gguf: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "tiny.gguf"
    write_file(path, KINDS["llama"], formats=FORMATS)
    return path


def answers(path: Path, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    engine = make_engine(path, skip_tokenizer_init=True, **{"quantization": "none"} | settings)
    found = [tokens for (tokens,) in run(engine, [Job(prompt, GREEDY) for prompt in prompts])]
    engine.close()
    return found


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_of_transformers(name: str, gguf: Any, tmp_path: Path) -> None:
    kind, path = KINDS[name], tmp_path / "tiny.gguf"
    model = write_file(path, kind, formats=FORMATS)
    assert model.config.model_type in MODEL_TYPES[kind.name], "adapters for this architecture are for such a model"
    prompts = [random_prompt(kind.shape.vocab, seed, length) for seed, length in ((0, 4), (1, 37), (2, 20))]
    clear = 0
    for prompt, tokens in zip(prompts, answers(path, prompts), strict=True):
        expected = reference.greedy(model, prompt, [], 8)
        if expected.margin > MIN_MARGIN:
            assert tokens == expected.answers[0].tokens
            clear += 1
    assert clear >= 2
    if kind.transformers:  # it reads the same numbers under the same names
        theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
        ours = {name: tensor for name, tensor in model.state_dict().items() if name in theirs}
        assert len(ours) >= len(model.state_dict()) - 1
        assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())


@torch.no_grad()
def test_vectors_of_a_model_for_texts(gguf: Any, tmp_path: Path) -> None:
    """EmbeddingGemma: hidden states of tokens that see both sides, pooled, multiplied twice, of length 1."""
    path = tmp_path / "tiny.gguf"
    model = write_file(path, EMBEDDING, formats=("Q8_0",))
    prompts = [random_prompt(EMBEDDING.shape.vocab, seed, length) for seed, length in ((0, 4), (1, 37), (2, 20))]
    engine = make_engine(path, skip_tokenizer_init=True, quantization="none")
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, PoolingParams())
    found = finish(engine)
    engine.close()
    for number, prompt in enumerate(prompts):
        wanted = model.model(torch.tensor([prompt])).last_hidden_state[0].mean(dim=0)
        for matrix in dense_matrices(model.config).values():
            wanted = matrix @ wanted
        wanted = wanted / wanted.norm()
        pooled = found[str(number)].pooled
        assert pooled is not None
        assert torch.allclose(torch.tensor(pooled.values()[0]), wanted, atol=1e-5)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_it_is_quantised_again_and_kept(
    quantization: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"quantization": quantization, "quantization_cache": str(tmp_path / "kept")}
    prompts = [[1, 5, 9]]
    made = answers(llama, prompts, **settings)
    read: list[str] = []
    original = Checkpoint.read
    monkeypatch.setattr(
        Checkpoint, "read", lambda self, name, *others: read.append(name) or original(self, name, *others)
    )
    assert answers(llama, prompts, **settings) == made
    assert read
    assert not any("_proj" in name for name in read), "they were kept"


@pytest.mark.parametrize("format", ["Q8_0", "Q5_0"])
def test_a_tied_table_is_kept_once(format: str, gguf: Any, tmp_path: Path) -> None:
    """An output matrix keeps the numbers of its table, and tokens are looked up there."""
    path = tmp_path / "tiny.gguf"
    model = write_file(path, KINDS["llama-biases"], formats=(format,))
    engine = make_engine(path, skip_tokenizer_init=True, quantization="stored")
    (head,) = [module for module, kind in engine.runner.model.matrices("stored") if kind and module.shared]
    assert isinstance(head, Linear)
    held = head.packed and head.packed.native
    assert held is not None
    table = model.state_dict()["lm_head.weight"]
    torch.testing.assert_close(gemm.unpack(held), table, rtol=1e-6, atol=2e-6)
    embedding = engine.runner.model.decoder.embedding
    assert embedding.tokens.numel() == head.weight.numel() == 0
    ids = torch.tensor([5, 0, 5, len(table) - 1])
    assert torch.equal(embedding.look_up(ids, torch.float32), table[ids])
    engine.close()


@pytest.mark.parametrize(("format", "kind"), [("Q8_0", "int8"), ("Q4_1", "int4"), ("Q4_0", "q4_0")])
def test_matrices_of_a_conv1d_stay_as_they_are_stored(format: str, kind: str, gguf: Any, tmp_path: Path) -> None:
    """A file has them by outputs, transformers by inputs."""
    path = tmp_path / "tiny.gguf"
    model = write_file(path, KINDS["gpt2"], formats=(format,))
    engine = make_engine(path, skip_tokenizer_init=True, quantization="stored")
    matrices = {module: kind for module, kind in engine.runner.model.matrices("stored") if not module.shared}
    assert set(matrices.values()) == {kind}
    (one,) = [module for module in matrices if module is engine.runner.model.decoder.blocks[0].ffn.inner.up]
    held = one.packed and one.packed.native
    assert held is not None
    expected = model.state_dict()["transformer.h.0.mlp.c_fc.weight"].T
    torch.testing.assert_close(gemm.unpack(replace(held, bias=None)), expected, rtol=2e-3, atol=1e-4)
    engine.close()


def test_it_stays_as_small_as_it_is_stored(gguf: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Matrices are taken in their own bits, also where heads are interleaved and where several kinds are multiplied as
    one; plain ones stay plain."""
    path = tmp_path / "tiny.gguf"
    model = write_file(path, KINDS["llama"], formats=("Q4_0", "Q4_1", "Q5_1", "Q4_0", "F16", "Q8_0"))
    plain = {name: tensor for name, tensor in model.state_dict().items() if tensor.dim() == 2}
    with Checkpoint(stand_in(path)) as stored:
        kinds = {name: stored.own_kind(name) for name in plain}
        for name, kind in kinds.items():
            assert (kind is not None) == stored.few_bits(name)
            if kind is not None:
                made = stored.quantised(name, own=True)
                dense = numbers(made) if isinstance(made, gemm.Blocks) else made.dense()
                assert torch.equal(dense, plain[name])
    assert any("k_proj" in name and kind == "q5_1" for name, kind in kinds.items())
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "quantization": "stored"}
    with caplog.at_level("DEBUG", "octavo.model"):
        engine = make_engine(path, **settings)
    found = {module.stored for module, _ in engine.runner.model.matrices("stored")}
    assert Parts(("int4", "q5_1", "q4_0"), (64, 32, 32)) in found
    assert {"q5_1", None} < found
    assert "int8" not in found
    embedding, ids = engine.runner.model.decoder.embedding, torch.tensor([7, 0, 7])
    assert embedding.tokens.numel() == 0
    assert torch.equal(embedding.look_up(ids, torch.float32), plain["model.embed_tokens.weight"][ids])
    assert "are used in their stored format" in caplog.text
    assert "become int8" not in caplog.text
    prompt = random_prompt(KINDS["llama"].shape.vocab, 3, 40)
    small = logprobs(engine, prompt)
    engine.close()
    engine = make_engine(path, skip_tokenizer_init=True, quantization="none")
    exact = logprobs(engine, prompt)
    engine.close()
    assert 0 < float((small - exact).abs().median() / exact.std()) < 0.05
    facts = {kind: inspect_model(EngineConfig(model=str(path), device="cpu", **settings | {"quantization": kind}))
             for kind in ("none", "int8", "stored")}  # fmt: skip
    assert facts["stored"].weights < facts["none"].weights


@pytest.mark.parametrize(
    ("name", "formats", "quantization"),
    [("llama-biases", ("Q8_0",), None), ("llama", ("Q4_0",), None), ("llama-biases", ("BF16",), None),
     ("llama", ("BF16",), "int8"), ("llama-biases", ("Q8_0",), "none"), ("llama-biases", ("BF16",), "int4"),
     ("llama", ("Q5_0", "Q4_1", "Q8_0"), None), ("llama-biases", ("Q5_1",), None), ("llama", ("F16",), "int8-fast")],
)  # fmt: skip
def test_memory_is_what_was_predicted(
    name: str, formats: tuple[str, ...], quantization: Any, gguf: Any, tmp_path: Path
) -> None:
    """Bytes of all that a model holds, counted, with one table and with two."""
    path, shape = tmp_path / "tiny.gguf", KINDS[name].shape
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    wide = replace(shape, vocab=1024, settings=shape.settings | sizes)
    write_file(path, replace(KINDS[name], shape=wide), formats=formats)
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "quantization": quantization, "quantization_cache": "off"}
    facts = inspect_model(EngineConfig(model=str(path), device="cpu", dtype="float32", **settings))
    engine = make_engine(path, **settings)
    model = engine.runner.model
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    for module in model.modules():
        if isinstance(module, Linear) and module.packed is not None:
            assert module.packed.native is not None
            assert not module.weight.numel()
            held += module.packed.native.nbytes
        if isinstance(module, TokenEmbedding) and isinstance(module.look_up, StoredRows):
            held += module.look_up.octets.nbytes
    engine.close()
    assert facts.resident - PROCESS == pytest.approx(held, rel=0.07)
    assert facts.peak - STARTING == facts.resident - PROCESS, "a model of this size loads in less"


def test_a_single_block_is_taken() -> None:
    """Whose bytes do not lie where words may lie."""
    for number in (2, 3):
        format = find_format(number)
        assert format is not None
        octets = torch.arange(format.size, dtype=torch.uint8) * 7
        octets[1] = octets[3] = 0x3C
        assert torch.equal(as_quantised(octets, format, 1).dense().flatten(), dequantise(octets, format))


def test_scales_that_no_half_holds_are_refused() -> None:
    format = find_format(12)
    assert format is not None
    octets = torch.full((1, format.size), 0x7B, dtype=torch.uint8)  # halves of 61,280 times integers of 6 bits
    with pytest.raises(ModelLoadError, match=r"65,504, the largest float16\. Use --quantization none"):
        as_quantised(octets.flatten(), format, 1)


def test_q4_k_is_taken_as_it_is() -> None:
    """Blocks of any bytes, but that scales and minima are rounded to halves."""
    format = find_format(12)
    assert format is not None
    octets = torch.randint(0, 256, (6 * 2, format.size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    octets[:, 1] &= 0x3F  # halves below 2
    octets[:, 3] &= 0x3F
    exact = dequantise(octets.flatten(), format).view(6, -1)
    made = as_quantised(octets.flatten(), format, 6)
    assert made.inputs == 512
    largest = made.scales.float().abs().amax(-1, keepdim=True).repeat_interleave(32, 2).flatten(1)
    assert ((made.dense() - exact).abs() <= largest * 16 * 2.0**-11).all()


@each_isa
@pytest.mark.parametrize(("threads", "count"), [(1, 3), (2, 5000)])
def test_the_kernel_makes_q6_ks_numbers_as_torch_does(isa: str, threads: int, count: int) -> None:
    """Bit for bit, of blocks of any bytes whose scales are numbers; many, so that threads share them."""
    format = find_format(14)
    assert format is not None
    assert format.decode is not None
    octets = torch.randint(0, 256, (count, format.size), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    octets[:, -1] &= 0xBF  # halves below 2
    data = torch.cat((torch.zeros(3, dtype=torch.uint8), octets.flatten()))[3:]  # words do not begin where words may
    wanted = numbers_of(format.decode(octets)).flatten(1)
    with kernels_of(isa, threads):
        found = [dequantise(data, format), dequantise(data, format, torch.bfloat16)]
    assert torch.equal(found[0].view(torch.int32), wanted.flatten().view(torch.int32))
    assert torch.equal(found[1], wanted.flatten().bfloat16())


@pytest.mark.parametrize("number", [3, 8, 12])
def test_kernels_take_blocks_as_torch_does(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, of blocks of any bytes whose scales are numbers; many, so that threads share them."""
    format = find_format(number)
    assert format is not None
    octets = torch.randint(0, 256, (4099, format.size), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    for place in format.halves:
        octets[:, place + 1] &= 0xBF  # halves below 2
    data = torch.cat((torch.zeros(3, dtype=torch.uint8), octets.flatten()))[3:]  # words do not begin where words may
    calls: list[torch.Tensor] = []
    by_kernel = int(blocks.native.available())
    name = f"take_{format.name.lower()}"
    take = getattr(blocks, name)
    monkeypatch.setattr(blocks, name, lambda *given: (calls.append(given[0]), take(*given)))
    found = as_quantised(data, format, 4099)
    monkeypatch.setattr(blocks.native, "available", lambda: False)
    wanted = as_quantised(data, format, 4099)
    assert len(calls) == by_kernel
    assert torch.equal(found.values, wanted.values)
    assert torch.equal(found.scales.view(torch.int16), wanted.scales.view(torch.int16))


@needs_native
def test_halves_that_are_no_numbers_are_counted() -> None:
    octets = torch.zeros(5000, 22, dtype=torch.uint8)
    for row, high in ((0, 0x7C), (17, 0x7D), (4998, 0xFC), (4999, 0xFF), (20, 0x7B), (21, 0x80)):
        octets[row, 5] = high
    assert count_infinite(octets, 4) == 4
    assert count_infinite(octets, 6) == 0


def test_one_of_plain_numbers_is_written_in_few_bits(
    gguf: Any, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a checkpoint of its own, which is served alike; one of few bits is refused."""
    path = tmp_path / "plain.gguf"
    write_file(path, KINDS["llama"], formats=("F16", "F32"))
    assert inspect_model(EngineConfig(model=str(path), device="cpu", skip_tokenizer_init=True)).weights_as_stored == 0
    quantise_checkpoint(str(path), tmp_path / "new", "int8", show_progress=False)
    prompts = [[1, 5, 9], [4]]
    monkeypatch.setattr(quantised_loading, "form_on", lambda _device, _kind: "portable")
    assert answers(tmp_path / "new", prompts, quantization=None) == answers(path, prompts, quantization="int8")
    write_file(tmp_path / "gpt2.gguf", KINDS["gpt2"], formats=("F16",))
    with pytest.raises(UnsupportedModelError, match=r"needs matrices .* inputs are a multiple of 32"):
        quantise_checkpoint(str(tmp_path / "gpt2.gguf"), tmp_path / "more", "int8", show_progress=False)
    with pytest.raises(UnsupportedModelError, match=r"already quantized \(GGUF \(Q4_0, Q5_1, Q8_0\)\)"):
        quantise_checkpoint(str(llama), tmp_path / "more", "int8", show_progress=False)


def test_where_files_are_found(llama: Path, cache: Path, tmp_path: Path) -> None:
    """The folder that stands for a file is made once for each version of it."""
    found = checkpoint.locate(str(llama))
    assert found.parent == cache
    assert checkpoint.locate(str(llama.parent)) == found, "the folder's only file"
    assert checkpoint.locate(str(found)) == found
    link = tmp_path / "link.gguf"
    link.symlink_to(llama)
    assert checkpoint.locate(str(link)) == found
    blob = Path(shutil.copy(llama, tmp_path / "0a1b2c"))  # as the hub's cache has it
    (tmp_path / "named.gguf").symlink_to(blob)
    with Checkpoint(checkpoint.locate(str(tmp_path / "named.gguf"))) as opened:
        assert opened.path == blob
        assert "model.embed_tokens.weight" in opened.names
    copied = tmp_path / "copied"
    copied.mkdir()
    copy = Path(shutil.copy(llama, copied / "one.gguf"))
    (copied / "mmproj-one.gguf").write_bytes(b"not looked at")
    first = checkpoint.locate(str(copied))
    assert first != found
    os.utime(copy, ns=(1, 1))
    second = checkpoint.locate(str(copy))
    assert second != first
    copy.unlink()
    os.utime(llama, ns=(2, 2))
    checkpoint.locate(str(llama))
    assert not first.exists()
    assert not second.exists(), "the file is gone"
    assert found.exists(), "it is still a file's"


def test_what_is_no_single_file(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere\.gguf does not exist"):
        checkpoint.locate("nowhere.gguf")
    (tmp_path / "a.gguf").symlink_to(llama)
    for wrong, meant in ((tmp_path / "aa.gguf", tmp_path / "a.gguf"), (f"{tmp_path}s", tmp_path)):
        with pytest.raises(ModelLoadError, match=rf"{wrong} does not exist\. Did you mean {meant}\?"):
            checkpoint.locate(str(wrong))
    (tmp_path / "b.gguf").symlink_to(llama)
    with pytest.raises(ModelLoadError, match=r"contains 2 GGUF files \(a\.gguf, b\.gguf\)\. Choose one"):
        checkpoint.locate(str(tmp_path))
    (tmp_path / "a-00001-of-00002.gguf").symlink_to(llama)
    with pytest.raises(ModelLoadError, match=r"contains 3 GGUF files \(a-0.*\)\. Choose one, such as .*/a\.gguf\."):
        checkpoint.locate(str(tmp_path))
    parts = tmp_path / "parts"
    parts.mkdir()
    for number in (1, 2):
        (parts / f"a-0000{number}-of-00002.gguf").symlink_to(llama)
    with pytest.raises(ModelLoadError, match=r"a model in parts \(a-0.*--merge .*/a-00001-of-00002\.gguf WHOLE\."):
        checkpoint.locate(str(parts))
    (tmp_path / "x.gguf").write_text("nothing of the kind")
    with pytest.raises(ModelLoadError, match=r"x\.gguf is not a GGUF file: it begins with b'noth'"):
        checkpoint.locate(str(tmp_path / "x.gguf"))


def test_a_cache_that_cannot_be_written_to(
    llama: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("no folder")
    monkeypatch.setattr(folders, "make_spare", lambda name: tmp_path)
    assert stand_in(llama).parent == tmp_path

    def none(name: str) -> Path:
        raise PermissionError("no place")

    monkeypatch.setattr(folders, "make_spare", none)
    with pytest.raises(ModelLoadError, match=r"this user's cache \(no place\)\. Set XDG_CACHE_HOME"):
        stand_in(llama)


def test_what_it_says_of_itself(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    facts = inspect_model(EngineConfig(model=str(llama), device="cpu"))
    assert facts.architecture == "LlamaForCausalLM"
    assert facts.weight_files == 1
    assert {"Q8_0", "Q4_0", "Q5_1", "BF16", "F32"} >= facts.stored.keys() >= {"Q8_0", "Q4_0"}
    assert sum(facts.stored.values()) < llama.stat().st_size
    with caplog.at_level("INFO", logger="octavo"):
        engine = make_engine(llama, skip_tokenizer_init=True)
    assert "use llama.cpp's: temperature 0.8, top_k 40, top_p 0.95, min_p 0.05" in caplog.text
    decoding = engine.info.decoding
    assert [decoding[name] for name in ("temperature", "top_k", "top_p", "min_p")] == [0.8, 40, 0.95, 0.05]
    assert engine.info.given_up_for_temperature == ("top_k", "top_p", "min_p")
    assert f"The weights of {llama} are GGUF (Q8_0" in caplog.text
    assert (engine.info.model_path, engine.info.model_file) == (str(facts.path), str(llama))
    with caplog.at_level("INFO", logger="octavo.server"):
        log_facts(engine.info, None, "tiny")
        assert "No chat" not in caplog.text
        log_facts(engine.info, SimpleNamespace(chat_template=None, token_id=lambda text: None), "tiny")  # type: ignore[arg-type]
        assert "No chat: the model has no chat template" in caplog.text
        assert "set --chat-template to a file or a name such as chatml" in caplog.text
    assert f"Model tiny from {llama}: " in caplog.text
    engine.close()


def test_one_without_a_tokenizer_is_refused_before_its_weights_are_read(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless another's is named, or none is wanted."""
    with monkeypatch.context() as patched:
        patched.setattr(starting, "load", None)
        with pytest.raises(ModelLoadError, match=r"No tokenizer can be made from .*tiny\.gguf: .*Set --tokenizer"):
            make_engine(llama)
    for settings in ({"tokenizer": str(tmp_path)}, {"skip_tokenizer_init": True}):
        make_engine(llama, **settings).close()
    few = ["--concurrency", "1", "--num-requests", "1", "--warmup", "0", "--input-len", "4", "--output-len", "2"]
    assert main(["bench", "offline", str(llama), *few, "--kv-cache-memory", "1MiB", "--quiet"]) == 0, "of token ids"


def test_octavo_models_answers_for_one_without_a_tokenizer(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would be served with another's."""
    assert main(["models", str(llama)]) == 0
    shown = capsys.readouterr().out
    assert "tokenizer      none" in shown
    assert "MiB packed as stored, on cpu" in shown
    assert "tokens fit; at most " in shown
    assert f"octavo serve {llama} --tokenizer NAME" in shown
    assert main(["models", str(llama), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["supported"], found["tokenizer"]) == (True, None)


def test_missing_memory_is_reported_with_the_files_name(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "available_memory", lambda: 0)
    with pytest.raises(ModelLoadError, match=f"^The weights of {re.escape(str(llama.resolve()))} take"):
        starting.start(EngineConfig(model=str(llama), device="cpu", skip_tokenizer_init=True))


def test_octavo_models_says_that_a_file_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """It is taken for a file, not for a family's name."""
    assert main(["models", "nowhere.gguf"]) == 1
    assert "The file nowhere.gguf does not exist." in capsys.readouterr().err


def test_rows_are_read_alone(llama: Path) -> None:
    weights = GgufWeights(llama)
    for name in weights.keys():  # noqa: SIM118  it is safetensors' interface
        whole = weights.get_tensor(name)
        part = weights.get_slice(name)
        assert part.get_shape() == list(whole.shape)
        assert torch.equal(part[1:3], whole[1:3])
        assert torch.equal(part[0:9999], whole)


Change = Callable[[Any], None]
REFUSED: dict[str, tuple[Change, str]] = {
    "setting": (lambda w: w.add_uint32("llama.unheard_of", 1), r"architecture llama: llama\.unheard_of"),
    "window": (
        lambda w: w.add_sliding_window(64),
        r"llama\.attention\.sliding_window must be 0, got 64: a window is",
    ),
    "causal": (
        lambda w: w.add_causal_attention(False),
        r"llama\.attention\.causal must be True, got False: attention to later tokens is",
    ),
    "rotation": (lambda w: put(w, "llama.rope.dimension_count", 8), r"rope\.dimension_count must be 16, got 8"),
    "scaling": (lambda w: put(w, "llama.rope.scaling.type", "ntk"), r"rope\.scaling\.type is 'ntk', which is not supp"),
    "layers": (lambda w: put(w, "llama.attention.head_count_kv", [2, 1]), r"layers differ in llama\.attention\.head_c"),
    "number": (
        lambda w: put(w, "llama.rope.freq_base", "x"),
        r"rope\.freq_base of its metadata should be a number",
    ),
    "absent": (
        lambda w: w.kv_data[0].pop("llama.block_count"),
        r"block_count .* should be a whole number, but ",
    ),
    "architecture": (
        lambda w: put(w, "general.architecture", "mamba"),
        r"mamba, which is not supported.*Supported: command-r, falcon-h1, g",
    ),
    "part": (lambda w: put(w, "split.count", 3), r"is one of 3 files of a model\. Join them: llama-gguf-split --merge"),
    "importance": (lambda w: put(w, "general.type", "imatrix"), r"importance matrix \(imatrix\), not a model\."),
    "older importance": (lambda w: put(w, "general.architecture", "imatrix"), r"is an importance matrix \(im"),
    "vocabulary": (
        lambda w: (w.tensors[0].clear(), w.add_token_list(["a", "b"])),
        r"contains a vocabulary and no weights\. Choose the file of the model",
    ),
    "nothing": (lambda w: w.tensors[0].clear(), r"tiny\.gguf contains no tensors\. Choose"),
    "kind": (lambda w: put(w, "general.type", "adapter"), r"is not a model: its general\.type is 'adapter'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str, gguf: Any, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in {
        "block_count": 1, "context_length": 96, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5,
    }.items():  # fmt: skip
        put(writer, f"llama.{key}", value)
    writer.add_tensor("token_embd.weight", torch.zeros(19, 64).numpy())
    if name in ("architecture", "older importance"):
        writer.kv_data[0].pop("general.architecture")
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError if name not in ("number", "absent") else ModelLoadError, match=message):
        checkpoint.locate(str(path))
