"""GGUF models with an image projector: crops, tokens and answers are those of the checkpoint that they were made of,
which other tests compare with transformers."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import random_prompt
from support.driving import finish, make_engine
from support.gguf_files import library
from support.gguf_pairs import PAIRS, write_pair, write_projector
from support.seeing import VOCAB, SeeingModel, make_seeing_model, picture
from test_http_seeing import Api, shown

from cli.main import main
from engine import LLM, SamplingParams
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.images import crop, read_cropping
from engine.model.checkpoint import locate
from engine.model.gguf import folder as folders
from engine.model.gguf.folder import stand_in

ORACLE = Path(sys.prefix) / "clients" / "quantised"  # tools/setup.py puts it there
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True)
SIZES = [(40, 31), (90, 20), (13, 70), (150, 129)]


@pytest.fixture(scope="module", autouse=True)
def gguf() -> Iterator[Any]:
    with library(ORACLE) as module:
        yield module


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(folders, "cache_folder", lambda name: place / name)
    return place / "gguf"


def words(seed: int, count: int) -> list[int]:
    return [token for token in random_prompt(VOCAB, seed, 3 * count) if 30 < token < 280][:count]


def answers(path: Path, model: SeeingModel, **settings: Any) -> list[Any]:
    """Tokens and their log probabilities after prompts with an image, and with several."""
    engine = make_engine(path, block_size=4, dtype="float32", **settings)
    info = engine.info.vision
    assert info is not None
    given: list[list[Any]] = [[*words(n, 3 + n), picture(*size, n), *words(9 + n, 4)] for n, size in enumerate(SIZES)]
    given += [[picture(30, 44, 70), *words(71, 5), picture(61, 20, 72), *words(74, 2)], words(80, 9)]
    for number, parts in enumerate(given):
        engine.add_request(str(number), model.prompt(parts, info), GREEDY)
    found = finish(engine)
    engine.close()
    return [
        (answer.token_ids, [next(iter(step.values())).logprob for step in answer.logprobs or ()])
        for number in range(len(given))
        for answer in found[str(number)].outputs
    ]


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_is_the_checkpoint(name: str, tmp_path: Path) -> None:
    """The path of the language model's file is enough for every family, because the projector lies beside it."""
    (tmp_path / "stored").mkdir()
    model = make_seeing_model(name, tmp_path / "stored")
    text, _ = write_pair(model, PAIRS[name], tmp_path)
    ours, theirs = read_cropping(stand_in(text)), read_cropping(model.path)
    assert ours is not None
    assert theirs is not None
    for number, size in enumerate(SIZES):
        image = picture(*size, number)
        made, wanted = (crop(image, each, alone=True) for each in (ours, theirs))
        assert made.tiles == wanted.tiles
        assert np.array_equal(made.pixels, wanted.pixels)
    expected = answers(model.path, model)
    found = answers(text, model, quantization="none")
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, given), (_, wanted) in zip(found, expected, strict=True):
        assert given == pytest.approx(wanted, abs=1e-5)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[SeeingModel, Path, Path]:
    """A model of Qwen2-VL, whose projector stores some tensors in parts; matrices whose rows allow it are quantised."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "stored").mkdir()
    model = make_seeing_model("qwen2-vl", folder / "stored")
    return model, *write_pair(model, PAIRS["qwen2-vl"], folder, format="Q8_0")


def test_chat(pair: tuple[SeeingModel, Path, Path]) -> None:
    """Texts and images of a conversation become the tokens that the checkpoint's tokenizer makes of them."""
    model, text, projector = pair
    content = [{"type": "text", "text": "see"}, {"type": "image", "image": picture(60, 45)}]
    found = []
    for path, given in ((text, str(projector)), (model.path, None)):
        llm = LLM(str(path), mmproj=given, dtype="float32", device="cpu", show_progress=False, seed=1)
        vision = llm.engine.info.vision
        assert vision is not None
        (answer,) = llm.chat([{"role": "user", "content": content}], GREEDY)
        found.append([token if token != vision.token_id else -1 for token in answer.prompt_token_ids])
        assert found[-1].count(-1) == vision.count(1, (45, 60))
        llm.close()
    assert found[0] == found[1]


def test_chat_over_http(pair: tuple[SeeingModel, Path, Path], tmp_path: Path) -> None:
    """The answer is that of the same files without a server."""
    model, text, projector = pair
    image = picture(60, 45)
    service = Api(SeeingModel(model.shape, stand_in(text, str(projector)), model.model))
    found = service.chat({"type": "text", "text": "see"}, shown(image))
    service.workers.close()
    llm = LLM(str(text), mmproj=str(projector), dtype="float32", device="cpu", show_progress=False, seed=1)
    content = [{"type": "text", "text": "see"}, {"type": "image", "image": image}]
    (expected,) = llm.chat([{"role": "user", "content": content}], SamplingParams(temperature=0.0, max_tokens=6))
    llm.close()
    assert found["choices"][0]["token_ids"] == expected.outputs[0].token_ids
    assert found["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


def test_choosing_a_projector(pair: tuple[SeeingModel, Path, Path], tmp_path: Path) -> None:
    _, text, projector = pair
    assert (stand_in(text) / "preprocessor_config.json").exists()
    assert stand_in(text) == stand_in(text, str(projector))
    assert not (stand_in(text, "none") / "preprocessor_config.json").exists()
    alone = tmp_path / "alone.gguf"
    alone.symlink_to(text)
    assert stand_in(alone) == stand_in(text, "none"), "nothing lies beside it"
    assert stand_in(alone, str(projector)) == stand_in(text)
    with pytest.raises(ModelLoadError, match=r"projector /no/where\.gguf does not exist\. Correct --mmproj\."):
        stand_in(text, "/no/where.gguf")
    with pytest.raises(ModelLoadError, match="is an image projector, which serves beside a model: octavo serve MODEL"):
        stand_in(projector)
    with pytest.raises(ModelLoadError, match=r"but .* is a folder in Hugging Face's format"):
        locate(str(pair[0].path), mmproj=str(projector))


def test_models_shows_what_a_pair_sees(
    pair: tuple[SeeingModel, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, text, projector = pair
    assert main(["models", str(text), "--mmproj", str(projector), "--kv-cache-memory", "1MiB"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"images +at most 4096 tokens for each in a chat, read by mmproj-tiny\.gguf\n", shown)
    assert re.search(r"stored as +F32 .*Q8_0", shown)
    assert f"octavo serve {text} --mmproj {projector}" in shown
    assert main(["models", str(text), "--mmproj", "none", "--kv-cache-memory", "1MiB"]) == 0
    assert "images" not in capsys.readouterr().out


PROBLEMS: dict[str, tuple[Any, str]] = {
    "clip.projector_type": ("glm4v", r"of the type glm4v, which is not supported\. Supported: gemma3, idefics3, in"),
    "clip.has_vision_encoder": (False, r"of the type qwen2vl_merger without a vision encoder, which is not supported"),
    "general.architecture": ("llama", r"is not an image projector: its architecture is 'llama', not clip"),
    "clip.vision.swiglu_clamp": (1.5, r"has settings that are not supported .* clip\.vision\.swiglu_clamp"),
    "clip.vision.block_count": (1 << 20, r"should have 1048576 layers with 2 heads, but lacks their tensors"),
    "clip.vision.attention.head_count": (0, r"should have 2 layers with 0 heads, but lacks their tensors"),
    "clip.vision.image_mean": (
        [0.5, 0.5],
        r"clip\.vision\.image_mean of its metadata should be a number for each",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_projectors_that_do_not_fit(
    name: str, pair: tuple[SeeingModel, Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is named is refused; beside one that was found, the model is served without images."""
    value, message = PROBLEMS[name]
    model, text, _ = pair
    changed, path = tmp_path / "mmproj.gguf", tmp_path / "model.gguf"
    path.symlink_to(text)
    write_projector(model, PAIRS["qwen2-vl"], changed, changes={name: value})
    with pytest.raises(UnsupportedModelError, match=message):
        stand_in(path, str(changed))
    assert not (stand_in(path) / "preprocessor_config.json").exists()
    assert re.search(f"Requests with images are refused: .*{message}", caplog.text)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [("mistral3", "mm.patch_merger.weight", "lacks the matrix mm.patch_merger.weight"),
     ("qwen2-vl", "v.blk.0.ffn_up.weight", "but lacks their tensors, such as"),
     ("qwen2-vl", "v.patch_embd.weight", r"mmproj-tiny\.gguf: the tensor visual\.patch_embed\.proj\.weight"),
     ("qwen2-vl", "mm.0.bias", r"tensor visual\.merger\.mlp\.0\.bias should have the shape \[96\], but is stored as")],
)  # fmt: skip
def test_tensors_of_other_shapes(
    name: str,
    tensor: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gguf: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that is stored flat is refused like one that is missing. Beside a projector that was only found, the model is
    served without images."""
    (tmp_path / "stored").mkdir()
    model = make_seeing_model(name, tmp_path / "stored")
    text, projector = write_pair(model, PAIRS[name], tmp_path)
    add = gguf.GGUFWriter.add_tensor

    def flat(writer: Any, stored: str, values: Any, **kind: Any) -> None:
        wrong = values.reshape(-1) if values.ndim > 1 else values[:-1]
        add(writer, stored, wrong if stored == tensor else values, **kind)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", flat)
    write_projector(model, PAIRS[name], projector)
    with pytest.raises((ModelLoadError, UnsupportedModelError), match=message):
        make_engine(text, mmproj=str(projector)).close()
    engine = make_engine(text)
    assert engine.info.vision is None
    engine.close()
    assert re.search(f"Requests with images are refused: .*{message}", caplog.text)


def test_the_side_of_a_square_of_patches(tmp_path: Path) -> None:
    """A number that the metadata lack follows from the shape of the matrix that joins patches."""
    (tmp_path / "stored").mkdir()
    model = make_seeing_model("mistral3", tmp_path / "stored")
    text, projector = write_pair(model, PAIRS["mistral3"], tmp_path)
    name, bare = b"clip.vision.spatial_merge_size", tmp_path / "bare.gguf"
    stored = projector.read_bytes()
    assert name in stored
    bare.write_bytes(stored.replace(name, b"general.not_of_the_architecture"[: len(name)]))
    assert (stand_in(text, str(bare)) / "config.json").read_text() == (stand_in(text) / "config.json").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"clip.vision.image_std": [0.0, 1.0, 1.0]}, r"cannot be served with .*mmproj\.gguf: .*image_std must be"),
     ({"clip.vision.attention.head_count": 7}, r"mmproj\.gguf is not supported; the log says why.*--mmproj none")],
)  # fmt: skip
def test_a_named_projector_is_served_or_refused(
    changes: dict[str, Any], message: str, pair: tuple[SeeingModel, Path, Path], tmp_path: Path
) -> None:
    """The refusal is the same for settings that only the engine checks."""
    model, text, _ = pair
    changed, path = tmp_path / "mmproj.gguf", tmp_path / "model.gguf"
    path.symlink_to(text)
    write_projector(model, PAIRS["qwen2-vl"], changed, changes=changes)
    with pytest.raises(UnsupportedModelError, match=message):
        make_engine(path, mmproj=str(changed))
    engine = make_engine(path)
    assert engine.info.vision is None
    engine.close()


def test_damaged_files_beside_a_model(
    pair: tuple[SeeingModel, Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model is served without images."""
    _, text, projector = pair
    damaged, path = tmp_path / "mmproj.gguf", tmp_path / "model.gguf"
    path.symlink_to(text)
    for number, content in enumerate((b"", b"no model", projector.read_bytes()[:700], projector.read_bytes()[:-99])):
        damaged.write_bytes(content)
        caplog.clear()
        assert not (stand_in(path) / "preprocessor_config.json").exists(), number
        assert "Requests with images are refused" in caplog.text
        with pytest.raises(UnsupportedModelError, match=r"mmproj\.gguf is (damaged|not a GGUF file)"):
            stand_in(path, str(damaged))
    damaged.unlink()
    damaged.symlink_to(tmp_path / "nowhere")
    assert stand_in(path) == stand_in(path, "none")
