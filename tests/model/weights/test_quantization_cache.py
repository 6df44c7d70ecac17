"""Quantised weights kept on disk: the same to the bit as those made at load, of every family, without reading plain
matrices; stale, damaged and foreign files are noticed; and whatever is wrong with the folder, the load goes on."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.checkpoints import make_checkpoint
from support.driving import make_engine, run
from support.encoders import ENCODER_SHAPES, make_encoder_checkpoint
from support.everyday import EVERYDAY
from support.families import FAMILY_SHAPES, make_family_checkpoint
from support.image_shapes import SHAPES as IMAGE_SHAPES
from support.image_shapes import make_image_checkpoint
from support.jobs import CHECKPOINT, MIXED
from support.native import each_isa, kernels_of
from support.seq2seq import make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES as SEQ2SEQ_SHAPES
from test_stored_weights import KINDS as STORED
from test_stored_weights import checkpoint as stored_checkpoint
from torch import Tensor

from engine import ConfigError, EngineConfig
from engine.backends import native
from engine.backends.native.gemm import Form
from engine.backends.torch.attention import TorchReference
from engine.errors import ModelLoadError
from engine.model import families, quantised_cache, quantised_loading, weights
from engine.model.checkpoint import read_config
from engine.model.embedding import TokenEmbedding
from engine.model.experts import ExpertMatrices
from engine.model.families import build_spec
from engine.model.layers import Linear
from engine.model.quantisation import Quantization, Wanted, quantise, quantise_by_torch
from engine.model.quantised_cache import Writer, find_folder
from engine.model.transformer import Transformer
from engine.model.weight_files import SINGLE_FILE, Checkpoint, raw_bytes

KINDS: tuple[Quantization, ...] = ("int8", "int8-fast", "int4")
each_kind = pytest.mark.parametrize("kind", KINDS)


MAKERS: tuple[tuple[dict[str, Any], Callable[[Any, Path], Any]], ...] = (
    (FAMILY_SHAPES, make_family_checkpoint),
    (ENCODER_SHAPES, make_encoder_checkpoint),
    (SEQ2SEQ_SHAPES, make_seq2seq_checkpoint),
    (IMAGE_SHAPES, make_image_checkpoint),
)


def cases() -> Iterator[Any]:
    """Every family's plain shape, and shapes that share, own, join or leave out tables."""
    words = ("tied", "apart", "vocabularies", "own-head", "moe", "experts", "classes", "masked", "convolution", "gpt")
    words += ("teacher",)
    for shapes, make in MAKERS:
        for name, shape in shapes.items():
            if "-" not in name or any(word in name for word in words):
                marks = () if name in EVERYDAY else pytest.mark.slow
                yield pytest.param(shape, make, id=name, marks=marks)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    make_checkpoint(CHECKPOINT, tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that were read of checkpoints."""
    names: list[str] = []
    read = Checkpoint.read

    def reading(self: Checkpoint, name: str, *others: Any) -> Tensor:
        names.append(name)
        return read(self, name, *others)

    monkeypatch.setattr(Checkpoint, "read", reading)
    return names


@pytest.fixture
def quantised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was quantised, by kind."""
    kinds: list[str] = []

    def quantising(weight: Tensor, kind: Quantization, form: Form) -> Any:
        kinds.append(kind)
        return quantise(weight, kind, form)

    monkeypatch.setattr(quantised_loading, "quantise", quantising)
    return kinds


def load(
    path: Path,
    cache: Path | None,
    kind: Wanted | None = "int4",
    dtype: torch.dtype = torch.float32,
    *,
    show_progress: bool = False,
    share: bool = False,
) -> Transformer:
    config = read_config(path)
    spec = build_spec(config)
    return weights.load_model(
        path,
        config,
        spec,
        dtype=dtype,
        device=torch.device("cpu"),
        backend=TorchReference(),
        max_model_len=min(16, spec.max_positions or 16),
        show_progress=show_progress,
        quantization=kind,
        quantization_cache="off" if cache is None else str(cache),
        share_weights=share,
        pack=share,
    )


def sources(path: Path, model: Transformer, modules: list[Linear | ExpertMatrices]) -> set[str]:
    """Tensors of the checkpoint that fill these matrices, and the tables that are looked up in them."""
    names = {module: name for name, module in model.named_modules()}
    targets = {f"{names[module]}.weight" for module in modules}
    tables = [module for module in names if isinstance(module, TokenEmbedding)]
    targets |= {f"{names[table]}.tokens" for table in tables if not table.tokens.numel()}
    table = families.weight_table(read_config(path), model.spec)
    return {source for part in table.entries if part.target in targets for source in part.sources}


def entries(cache: Path) -> list[Path]:
    assert not list(cache.glob(".octavo-*")), "nothing unfinished is left"
    return sorted(cache.glob("*.safetensors"))


def products(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """What each matrix makes of the same numbers."""
    for name, module in model.named_modules():
        if isinstance(module, Linear | ExpertMatrices):
            x = torch.randn(3, module.inputs, generator=torch.Generator().manual_seed(len(name))).to(model.dtype)
            if isinstance(module, ExpertMatrices):
                count = len(module.packed or module.weight)
                yield from ((f"{name}.{expert}", module(x, expert)) for expert in range(count))
            else:
                yield name, module(x)


def assert_same(one: Transformer, other: Transformer) -> None:
    """All products and all plain parameters, to the bit."""
    one.pack("int4")  # matrices that are not quantised
    other.pack("int4")
    ours, theirs = dict(products(one)), dict(products(other))
    assert ours.keys() == theirs.keys()
    for name, made in ours.items():
        assert torch.equal(made.nan_to_num(), theirs[name].nan_to_num()), name
    parameters = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, parameters[name]), name


@pytest.mark.parametrize(("shape", "make"), list(cases()))
@pytest.mark.slow
def test_every_family(
    shape: Any, make: Callable[[Any, Path], Any], tmp_path: Path, cache: Path, reads: list[str], quantised: list[str]
) -> None:
    """What was kept is what is made, and no plain matrix is read for it but tables that are no output matrix."""
    path = tmp_path / "model"
    make(shape, path)
    made = load(path, cache)
    (entry,) = entries(cache)
    all_read, count = set(reads), len(quantised)
    reads.clear()
    kept = load(path, cache)
    assert entries(cache) == [entry]
    assert len(quantised) == count, "nothing is quantised again"
    wanted = [module for module, kind in kept.matrices("int4") if kind is not None]
    assert count == sum(len(m.packed) if isinstance(m.packed, list) else 1 for m in wanted) > 0
    plain = sources(path, kept, wanted)
    assert plain & all_read
    assert set(reads) == all_read - plain
    assert_same(made, kept)
    assert_same(load(path, None), kept)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by", ["native", "torch"])
def test_every_format(by: str, dtype: torch.dtype, kind: Quantization, llama: Path, cache: Path) -> None:
    """Each format has entries of its own, and so has each quantiser."""
    if by == "native" and not native.available():
        pytest.skip("there is no native library, nor a compiler")
    with native.use(native.current() if by == "native" else None):
        made, kept = load(llama, cache, kind, dtype), load(llama, cache, kind, dtype)
        assert_same(made, kept)
        assert_same(load(llama, None, kind, dtype), kept)
        assert len(entries(cache)) == 1
        for other in KINDS:
            load(llama, cache, other, dtype)
        load(llama, cache, kind, torch.float16 if dtype == torch.float32 else torch.float32)
        with native.use(None if by == "native" else native.current()):
            load(llama, cache, kind, dtype)
        assert len(entries(cache)) == (5 if native.available() or by == "native" else 4)


@each_kind
def test_answers_are_the_same(
    kind: Quantization, llama: Path, cache: Path, caplog: pytest.LogCaptureFixture, quantised: list[str]
) -> None:
    """Of the whole engine, to the bit, and the log says what happened in one line."""
    answers = []
    for setting, said in (
        ("off", "are not kept"),
        (str(cache), "kept for the next start in"),
        (str(cache), "mapped from" if native.available() else "read from"),
    ):
        caplog.clear()
        quantised.clear()
        with caplog.at_level(logging.INFO, "octavo.model"):
            engine = make_engine(llama, quantization=kind, quantization_cache=setting)
        (line,) = [record.getMessage() for record in caplog.records if "Quantized weights" in record.getMessage()]
        assert line.startswith(f"Quantized weights ({kind}) ")
        assert said in line
        assert bool(quantised) == (" from" not in said)
        answers.append(run(engine, MIXED))
        engine.close()
    assert answers[0] == answers[1] == answers[2]


def change(path: Path) -> None:
    """Other weights in a file of the same size."""
    held = load_file(path / SINGLE_FILE)
    for tensor in held.values():
        tensor.mul_(1.01)
    save_file(held, path / SINGLE_FILE, metadata={"format": "pt"})


@pytest.mark.parametrize("times", ["new", "kept"])
def test_a_checkpoint_that_has_changed(times: str, llama: Path, cache: Path) -> None:
    """Even one whose size and time of modification are those of the one before, as copies and archives make them."""
    load(llama, cache)
    (before,) = entries(cache)
    status = (llama / SINGLE_FILE).stat()
    time.sleep(0.02)  # the clock of files may be slow
    change(llama)
    if times == "kept":
        os.utime(llama / SINGLE_FILE, ns=(status.st_atime_ns, status.st_mtime_ns))
        now = (llama / SINGLE_FILE).stat()
        assert (now.st_size, now.st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    found = load(llama, cache)
    assert_same(load(llama, None), found)
    assert entries(cache) != [before]
    assert len(entries(cache)) == 1, "what was made of the old one is removed"


def test_a_checkpoint_that_changes_while_it_is_read(
    llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was read may be half the old one and half the new one."""
    keep = Writer.keep

    def late(self: Writer) -> None:
        os.utime(llama / SINGLE_FILE)
        keep(self)

    monkeypatch.setattr(Writer, "keep", late)
    load(llama, cache)
    assert "the checkpoint has changed meanwhile" in caplog.text
    assert not entries(cache)


def test_a_config_that_reads_the_same_file_otherwise(tmp_path: Path, cache: Path) -> None:
    """The first version of GPTQ stores zeros less one: the config says it, not the file."""
    path = tmp_path / "model"
    said, pack = STORED["gptq-8"]
    stored_checkpoint(path, said, pack)
    load(path, cache, "stored")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (path / "config.json").write_text(json.dumps(config))
    assert_same(load(path, None, "stored"), load(path, cache, "stored"))


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 16
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "halved": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: path.write_bytes(b""),
    "not written through": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "longer": lambda path: path.open("ab").write(b"more"),
    "a flipped bit at the end": lambda path: flip(path, 1),
    "a flipped bit inside": lambda path: flip(path, 0.6),
    "a flipped bit in the checksums": lambda path: flip(path, 0.2),
    "other tensors": lambda path: save_file({"x": torch.zeros(3)}, path),
    "text": lambda path: path.write_text("hello"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_made_again(
    damage: str, llama: Path, cache: Path, caplog: pytest.LogCaptureFixture, quantised: list[str]
) -> None:
    load(llama, cache)
    (entry,) = entries(cache)
    whole = entry.read_bytes()
    DAMAGES[damage](entry)
    assert entry.read_bytes() != whole
    caplog.clear()
    quantised.clear()
    assert_same(load(llama, None), load(llama, cache))
    assert quantised
    assert f"{entry} cannot be used and are computed again" in caplog.text
    assert entry.read_bytes() == whole
    quantised.clear()
    load(llama, cache)
    assert not quantised


@pytest.mark.parametrize("name", ["llama", "bert", "qwen3-moe"])
def test_progress_counts_what_was_kept(name: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as what is read and made, whether it is made, taken or found to be damaged."""
    path = tmp_path / name
    shapes, make = next((shapes, make) for shapes, make in MAKERS if name in shapes)
    make(shapes[name], path)
    bars: list[tuple[float | None, list[float]]] = []

    class Bar(weights._Bar):  # type: ignore[type-arg]
        def update(self, n: float | None = 1) -> bool | None:
            steps.append(n or 0)
            return super().update(n)

        def close(self) -> None:
            if not self.disable:
                bars.append((self.total, list(steps)))
            super().close()

    monkeypatch.setattr(weights, "_Bar", Bar)
    for _ in range(2):
        steps: list[float] = []
        load(path, cache, show_progress=True)
    flip(entries(cache)[0], 1)
    steps = []
    load(path, cache, show_progress=True)
    made, kept, damaged = bars
    size = sum(made[1])
    assert [total for total, _ in bars] == [size] * 3
    assert [sum(steps) for _, steps in bars] == [size] * 3
    assert min(kept[1]) >= 0
    assert max(kept[1]) < size / 2, "in steps"
    assert min(damaged[1]) < 0


def test_another_checkpoints_entry_is_not_used(
    llama: Path, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Renamed by whomever, of the same shape."""
    load(llama, cache)
    shutil.copytree(llama, tmp_path / "other")
    change(tmp_path / "other")
    load(tmp_path / "other", cache)
    one, other = entries(cache)
    one.write_bytes(other.read_bytes())
    assert_same(load(llama, None), load(llama, cache))
    assert_same(load(tmp_path / "other", None), load(tmp_path / "other", cache))
    assert "it was not made from this checkpoint" in caplog.text


def test_an_entry_of_other_matrices_is_not_used(llama: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever its key says."""
    load(llama, cache)
    (entry,) = entries(cache)
    held = load_file(entry)
    name = next(name for name in held if name.endswith(("qkv.packed.0", "qkv.values")))
    held[name] = held[name][:, :-1].clone()
    with safe_open(str(entry), framework="pt") as handle:
        metadata = handle.metadata()
    save_file(held, entry, metadata)
    assert_same(load(llama, None), load(llama, cache))
    assert "another shape or format" in caplog.text


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def fill_up(monkeypatch: pytest.MonkeyPatch) -> None:
    put, left = Writer.put, [3]

    def full(self: Writer, *arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(self, *arguments)

    monkeypatch.setattr(Writer, "put", full)


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("a file is in the way", "Not a directory|File exists"),
        ("read-only", "Read-only file system"),
        ("full", "No space left"),
        ("nearly full", "bytes of the 1000 that are free"),
        ("a small disk", "take at most 250, a quarter of the disk"),
        ("full at the end", "Read-only file system"),
        ("others can write", "other users can write to .* .mode 777"),
        ("someone else's", "belongs to another user"),
    ],
)
def test_a_folder_that_cannot_be_used(
    why: str,
    said: str,
    llama: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One warning names the setting, and the load goes on."""
    cache.mkdir(mode=0o700)
    used = cache
    match why:
        case "a file is in the way":
            (cache / "file").write_text("")
            used = cache / "file" / "folder"
        case "read-only":
            monkeypatch.delattr(os, "O_TMPFILE", raising=False)
            monkeypatch.setattr(tempfile, "mkstemp", refuse)
        case "full":
            fill_up(monkeypatch)
        case "nearly full":
            monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000, total=10**9))
        case "a small disk":
            monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9, total=1000))
        case "full at the end":
            monkeypatch.setattr(Writer, "keep", refuse)
        case "others can write":
            cache.chmod(0o777)
        case "someone else's":
            if os.getuid() == 0:
                os.chown(cache, 12345, -1)
            else:
                monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with caplog.at_level(logging.INFO, "octavo.model"):
        found = load(llama, used)
    (line,) = [record for record in caplog.records if "Quantized weights" in record.getMessage()]
    assert line.levelno == logging.WARNING
    assert "See --quantization-cache" in line.getMessage()
    assert re.search(said, line.getMessage())
    assert not entries(cache)
    monkeypatch.undo()
    assert_same(load(llama, None), found)


def test_what_lies_in_a_folder_that_cannot_be_written_to_is_used(
    llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, quantised: list[str]
) -> None:
    """As where root has made it when an image was built."""
    made = load(llama, cache)
    quantised.clear()
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    for name in ("utime", "unlink", "replace"):
        monkeypatch.setattr(os, name, refuse)
    assert_same(made, load(llama, cache))
    assert not quantised


def test_two_at_once_make_the_same(llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both write before either is done."""
    meeting, keep = threading.Barrier(2, timeout=60), Writer.keep

    def together(self: Writer) -> None:
        meeting.wait()
        keep(self)

    monkeypatch.setattr(Writer, "keep", together)
    found: list[Transformer] = []
    threads = [threading.Thread(target=lambda: found.append(load(llama, cache))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(entries(cache)) == 1
    assert_same(*found)
    assert_same(load(llama, None), load(llama, cache))


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_process_that_is_killed_leaves_nothing(
    unnamed: bool, llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Linux: what is written has no name until it is complete. Elsewhere it is a file beside its place."""
    if not unnamed:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    elif not hasattr(os, "O_TMPFILE"):
        pytest.skip("the system has no unnamed files")
    keep, seen = Writer.keep, list[Path]()

    def look(self: Writer) -> None:
        seen.extend(cache.iterdir())
        keep(self)

    monkeypatch.setattr(Writer, "keep", look)
    load(llama, cache)
    assert len(seen) == (not unnamed)
    assert len(entries(cache)) == 1


def test_a_checkpoint_that_cannot_be_loaded_leaves_nothing(llama: Path, cache: Path) -> None:
    held = load_file(llama / SINGLE_FILE)
    name = next(name for name in held if "down_proj" in name)
    held[name][0] = 1e30
    save_file(held, llama / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="exceed the range of float16"):
        load(llama, cache, dtype=torch.float16)
    assert not entries(cache)


def test_old_entries_are_removed_and_nothing_else(llama: Path, cache: Path, tmp_path: Path) -> None:
    """When a new one is made; a hit counts as use. Only what has such a name is ever touched."""
    load(llama, cache, "int8")
    (used,) = entries(cache)
    shutil.copytree(llama, tmp_path / "gone")
    load(tmp_path / "gone", cache, "int8")
    month = time.time() - 31 * 24 * 3600
    names = ("model.safetensors", "int8-notes.safetensors", "notes.txt")
    for path in (*(cache / name for name in names), cache / ".octavo-writing-a", cache / ".octavo-writing-b"):
        path.write_text("")
    for path in (*(cache / name for name in names), used, cache / ".octavo-writing-a"):
        os.utime(path, (month, month))
    old = cache / f"int4-{'0' * 32}.safetensors"
    shutil.copy(used, old)
    os.utime(old, (month, month))
    load(llama, cache, "int8")  # is used now
    shutil.rmtree(tmp_path / "gone")
    load(llama, cache, "int4")
    left = {path.name for path in cache.iterdir()}
    assert left == {*names, used.name, ".octavo-writing-b", *(p.name for p in cache.glob("int4-*"))}
    assert len(left) == 6
    assert not old.exists()


@pytest.mark.parametrize("odd", ["leads nowhere", "leads in a circle", "its checkpoint leads in a circle"])
def test_links_in_the_folder_are_no_obstacle(odd: str, llama: Path, cache: Path, tmp_path: Path) -> None:
    other = cache / f"int4-{'0' * 32}.safetensors"
    if odd.startswith("its"):
        shutil.copytree(llama, tmp_path / "other")
        load(tmp_path / "other", cache)
        (other,) = entries(cache)
        (tmp_path / "other" / SINGLE_FILE).unlink()
        (tmp_path / "other" / SINGLE_FILE).symlink_to(SINGLE_FILE)
    else:
        cache.mkdir(mode=0o700)
        other.symlink_to(other if "circle" in odd else tmp_path / "nowhere")
    load(llama, cache, "int8")
    (kept,) = entries(cache)
    assert kept.name.startswith("int8-")


def mapped_from(model: Transformer) -> set[str]:
    """The files that hold the matrices of a model."""
    places = [line.split() for line in Path("/proc/self/maps").read_text("utf-8").splitlines()]
    spans = [(*(int(end, 16) for end in place[0].split("-")), " ".join(place[5:])) for place in places]
    found = set()
    for module in model.modules():
        if isinstance(module, Linear | ExpertMatrices) and module.packed:
            products = [module.packed] if isinstance(module, Linear) else module.packed
            packed = [product.native for product in products if product.native is not None]
            for data in (part.data for each in packed for part in each.parts or (each,)):
                assert data.data_ptr() % 64 == 0
                found |= {file for start, end, file in spans if start <= data.data_ptr() < end}
    return found


SHARED: dict[str, tuple[Any, Quantization | None]] = {
    "arcee-biases-tied": (FAMILY_SHAPES, None), "qwen3-moe": (FAMILY_SHAPES, "int8"), "gpt2": (FAMILY_SHAPES, "int4"),
    "bert-masked": (ENCODER_SHAPES, None), "t5": (SEQ2SEQ_SHAPES, None),
}  # fmt: skip


@pytest.mark.skipif(not native.available() or sys.platform != "linux", reason="needs native kernels and /proc")
@pytest.mark.parametrize("name", SHARED)
def test_shared_weights_are_mapped(
    name: str, tmp_path: Path, cache: Path, reads: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """All matrices of any model lie in the file, to the bit as they are made, and none is read of the checkpoint."""
    shapes, kind = SHARED[name]
    make = next(make for found, make in MAKERS if found is shapes)
    make(shapes[name], tmp_path / "model")
    caplog.set_level(logging.INFO, "octavo.model")
    for number, dtype in enumerate((torch.float32, torch.bfloat16)):
        before = set(entries(cache)) if number else set()
        made = load(tmp_path / "model", cache, kind, dtype, share=True)
        (entry,) = set(entries(cache)) - before
        all_read = set(reads)
        reads.clear()
        caplog.clear()
        kept = load(tmp_path / "model", cache, kind, dtype, share=True)
        assert f"Packed weights are mapped from {entry}" in caplog.text
        modules = [module for module, _ in kept.matrices(kind)]
        assert all(module.is_packed for module in modules)
        assert set(reads) == all_read - sources(tmp_path / "model", kept, modules)
        assert mapped_from(kept) == {str(entry)}
        assert str(entry) not in mapped_from(made)
        assert_same(made, kept)


def test_the_least_recently_used_make_room(llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All together take at most a quarter of the disk."""
    for number, kind in enumerate(KINDS):
        load(llama, cache, kind)
        (entry,) = cache.glob(f"{kind}-?" + "[0-9a-f]" * 31 + ".safetensors")
        os.utime(entry, (time.time() - 60 * number,) * 2)
    size = sum(entry.stat().st_size for entry in entries(cache))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9, total=4 * size))
    load(llama, cache, "int8", torch.bfloat16)
    left = [entry.name.rsplit("-", 1)[0] for entry in entries(cache)]
    assert sorted(left) in (["int8", "int8", "int8-fast"], ["int8", "int8"])
    assert sum(entry.stat().st_size for entry in entries(cache)) <= size * 1.1


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_folder(None) == tmp_path / "octavo" / "quantization"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert find_folder(None) == tmp_path / "home" / ".cache" / "octavo" / "quantization"
    assert find_folder("~/mine") == tmp_path / "home" / "mine"
    assert find_folder("off") is None
    with pytest.raises(ConfigError, match="quantization_cache is ~nobody-here/x, but there is no such home folder"):
        find_folder("~nobody-here/x")
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("no home")))
    assert find_folder(None) is None
    with pytest.raises(ConfigError, match='quantization_cache must be a folder or off, got ""'):
        EngineConfig(model="m", quantization_cache="")


@each_isa
def test_numbers_belong_to_a_format(isa: str) -> None:
    """A change of what a quantiser makes of a weight, or of how that is stored, needs a new FORMAT, so that kept files
    of the one before are not used. Then the sums here change, too."""
    weight = ((torch.arange(70 * 100) * 7919 % 2003 - 1001) / 997).view(70, 100)
    expected: dict[tuple[Quantization, Form], str] = {
        ("int8", "rotated"): "97a78429af06007f 34e7b0c2bf7b2687",
        ("int8", "plain"): "902082d1781812c7 9006c00e09941cf4",
        ("int8-fast", "plain"): "9ed85f47de11320b 8647e347e1e16250",
        ("int4", "plain"): "fbc6fb7424e3735e 1c94216a4b7b60f1",
    }
    made = [(way, quantise_by_torch(weight, *way)) for way in expected if way[0] != "int4"]
    if native.available():
        with kernels_of(isa):
            made += [(way, quantise(weight, *way)) for way in expected]
    assert quantised_cache.FORMAT == 6
    for way, quantised in made:
        assert f"{_sum(quantised.values)} {_sum(quantised.scales)}" == expected[way]


def _sum(tensor: Tensor) -> str:
    return hashlib.sha256(raw_bytes(tensor)).hexdigest()[:16]
