"""Images of their own size, whose tokens have positions with three axes (Qwen's): chunks, pages, streams, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import reference
from support.driving import check_idle, finish, make_engine, watching
from support.executors import by_torch
from support.reference import MIN_MARGIN
from support.seeing import EOS, SeeingModel, make_seeing_model, make_tokenizer, picture
from test_http_seeing import CHAT, Api, shown, text
from test_image_prompts import GREEDY, WORDS, answer, info_of, vectors_of
from transformers.models.glm46v import image_processing_pil_glm46v as glm
from transformers.models.paddleocr_vl import image_processing_pil_paddleocr_vl as paddle
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from cli.commands import models
from engine import Engine, InvalidRequestError, PlacedImage, TokenInput
from engine.images import read_cropping
from engine.interface.vision import MOST_RATIO, Fitted
from engine.model.checkpoint import read_config
from engine.model.families import describe
from engine.model.families.qwen_vision import square_entries
from engine.model.positions import Rotary

SIZES = [(50, 40), (20, 90)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return make_seeing_model("qwen2.5-vl", tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def engine(model: SeeingModel) -> Iterator[Engine]:
    made = make_engine(model.path, block_size=4)
    yield made
    made.close()


def prompt_of(model: SeeingModel, engine: Engine, seed: int = 1) -> TokenInput:
    parts = [part for n, size in enumerate(SIZES) for part in (*WORDS[: 4 + n], picture(*size, seed + n))]
    return model.prompt([*parts, *WORDS[:3]], info_of(engine))


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "glm-ocr", "paddleocr-vl"])
def test_steps_pages_and_executors_change_nothing(name: str, tmp_path: Path) -> None:
    """Steps that cut through images, pages of the prefix cache, torch's executor, a crowd: the same tokens."""
    model = make_seeing_model(name, tmp_path)
    engine = make_engine(model.path, block_size=4)
    prompts = [prompt_of(model, engine, 1 + 3 * n) for n in range(3)]
    whole = [answer(engine, prompt) for prompt in prompts]
    hits = engine.stats().prefix_hits
    assert answer(engine, prompts[0]) == whole[0]
    assert engine.stats().prefix_hits - hits >= len(prompts[0].token_ids) - 4
    assert vectors_of(engine).num_made == 6
    engine.reset_prefix_cache()
    vectors_of(engine)._kept.clear()
    with by_torch(engine.runner.model):
        assert answer(engine, prompts[0]) == whole[0]
    assert vectors_of(engine).num_made == 8
    cut = make_engine(model.path, block_size=4, max_num_batched_tokens=7)
    with watching(cut) as plans:
        for number, prompt in enumerate(prompts):
            cut.add_request(str(number), prompt, GREEDY)
        found = finish(cut)
    assert [found[str(number)].outputs[0].token_ids for number in range(3)] == whole
    assert sum(image.first > 0 for plan in plans for image in plan.images) > 5  # within images
    check_idle(cut)
    cut.close()
    engine.close()


def test_pages_are_found_by_the_images_in_them(model: SeeingModel, engine: Engine) -> None:
    """Images of as many tokens and another shape share no page."""
    first, second = (
        model.prompt([*WORDS[:4], picture(*size, 1), 77], info_of(engine)) for size in ((48, 32), (32, 48))
    )
    assert list(first.token_ids) == list(second.token_ids)
    one = answer(engine, first)
    hits = engine.stats().prefix_hits
    assert answer(engine, second) != one
    assert engine.stats().prefix_hits - hits == 4  # the page before the image


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": (1, 201)}, "image 0: its longer side must be at most 200 times the shorter one"),
        ({"offset": 0}, "image 0: its image tokens must follow each other"),
    ],
)
def test_images_that_have_no_positions(
    change: dict[str, Any], message: str, model: SeeingModel, engine: Engine
) -> None:
    prompt = model.prompt([*WORDS[:4], picture(50, 40, 1)], info_of(engine))
    (image,) = prompt.images
    tokens = [*prompt.token_ids]
    tokens[0], tokens[image.offset] = tokens[image.offset], tokens[0]
    fields = {"offset": image.offset, "length": len(tokens) - 1, "pixels": image.pixels, "size": image.size} | change
    fields["length"] -= fields["offset"]
    with pytest.raises(InvalidRequestError, match=message):
        engine.add_request("one", TokenInput(tokens, images=(PlacedImage(**fields),)), GREEDY)
    check_idle(engine)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_angles_that_depend_on_a_length(
    kind: str, model: SeeingModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((model.path / "config.json").read_text())
    settings = {"factor": 2.0, "original_max_position_embeddings": 64, "short_factor": [1.0] * 4}
    config["text_config"]["rope_parameters"] |= settings | {"rope_type": kind, "long_factor": [2.0] * 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert describe(read_config(tmp_path)).vision is None
    assert f"rope_type of rope_parameters is {kind!r}" in caplog.text


def test_chat_and_streams_over_http(model: SeeingModel) -> None:
    api = Api(model)
    images = [picture(*size, 5 + n) for n, size in enumerate(SIZES)]
    content = [text("what"), shown(images[0]), text("or"), shown(images[1])]
    found = api.chat(*content)
    cropping = read_cropping(model.path)
    assert cropping is not None
    assert cropping.fitted is not None
    counts = [int(np.prod(cropping.fitted.grid((height, width)))) for width, height in SIZES]
    mark = "<start_of_image><image><end_of_image>"
    prompt = f"user: what{mark}or{mark}\nassistant: "
    for count in counts:
        prompt = prompt.replace("<image><", "<|>" * count + "<", 1)
    ids = make_tokenizer().encode(prompt.replace("<|>", "<image>"))
    expected = reference.greedy(model.model, ids, [EOS], 6, **model.seen(images, ids))
    assert expected.margin > MIN_MARGIN
    assert found["choices"][0]["token_ids"] == expected.answers[0].tokens
    assert found["usage"]["prompt_tokens"] == len(ids)
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 6, "stream": True}
    lines = [
        line.removeprefix("data: ") for line in api.post(CHAT, **body).text.splitlines() if line.startswith("data")
    ]
    said = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1]]
    assert lines[-1] == "[DONE]"
    assert "".join(said) == found["choices"][0]["message"]["content"]
    assert "at most 200 times" in api.refused(shown(picture(402, 2)))["message"]
    refusal = api.refused({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}})
    assert "video" in refusal["message"]
    api.workers.close()


def test_sizes_are_those_of_the_processor() -> None:
    rng = np.random.default_rng(0)
    for unit, least, most in ((28, 56**2, 28**2 * 1280), (8, 300, 4000), (32, 32**2 * 4, 32**2 * 5), (28, 1, 784)):
        fitted = Fitted(unit, least, most)
        for height, width in [*rng.integers(1, 3000, size=(300, 2)).tolist(), *rng.integers(1, 40, (100, 2)).tolist()]:
            if max(height, width) > MOST_RATIO * min(height, width):
                continue
            limits = {"factor": unit, "min_pixels": least, "max_pixels": most}
            timed = Fitted(unit, least, most, frames=2, grows="whole")
            grown = Fitted(unit, least, most, grows="sides")
            expected = [
                (fitted, smart_resize(height, width, **limits)),
                (timed, glm.smart_resize(2, height, width, **limits)),
                (grown, paddle.smart_resize(height, width, **limits)),
            ]
            for one, size in expected:
                assert one.size((height, width)) == size
                assert np.prod(one.grid((height, width))) <= one.most_vectors


def test_a_config_of_the_hub(tmp_path: Path) -> None:
    """That of Qwen2.5-VL-3B: the settings of its language part beside those of the whole."""
    vision = {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
              "in_chans": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "window_size": 112,
              "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2}  # fmt: skip
    config = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "hidden_size": 2048,
              "intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 2, "num_hidden_layers": 36,
              "max_position_embeddings": 128000, "max_window_layers": 70, "use_sliding_window": False,
              "sliding_window": 32768, "rope_theta": 1000000.0, "tie_word_embeddings": True, "vocab_size": 151936,
              "image_token_id": 151655, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
              "vision_config": vision}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = describe(read_config(tmp_path))
    assert model.vision is not None
    assert model.decoder is not None
    assert (model.vision.window, model.vision.squares, model.vision.axes) == (4, 2, True)
    assert [block.attention.in_parts for block in model.vision.tower.blocks].count(False) == 4
    position = model.decoder.blocks[0].attention.position
    assert isinstance(position, Rotary)
    assert [axis for axis, _ in position.pairs] == [0] * 16 + [1] * 24 + [2] * 24


def test_patches_of_one_frame(model: SeeingModel, tmp_path: Path) -> None:
    """Their kernel is stored with an axis of frames, too."""
    config = json.loads((model.path / "config.json").read_text())
    config["vision_config"]["temporal_patch_size"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    vision = describe(read_config(tmp_path)).vision
    assert vision is not None
    (first, *_) = square_entries(vision)
    assert first.transform.shapes(torch.Size((24, 48))) == [torch.Size((24, 3, 1, 4, 4))]


def test_models_says_what_an_image_costs(model: SeeingModel, capsys: pytest.CaptureFixture[str]) -> None:
    assert models.run([str(model.path)]) == 0
    assert "at most 111 tokens for each in a chat" in capsys.readouterr().out
