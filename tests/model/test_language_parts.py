"""Vision-language models are served as their language parts: the same tokens and hidden states as the whole without an
image."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import reference
from support.checkpoints import random_prompt
from support.driving import Job, add, finish, make_engine
from support.family_shape import fill_randomly
from support.pages import Pages, close, load, scattered_tables
from support.reference import MIN_MARGIN
from support.seeing import as_published
from torch import nn

from engine import Engine, SamplingParams
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model.families.language_part import ARCHITECTURES

VOCAB, EOS, TOKENS = 199, 7, 16
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1]}}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "num_heads": 2}
CLIP, SIGLIP = VISION | {"model_type": "clip_vision_model"}, VISION | {"model_type": "siglip_vision_model"}
DELTA: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1],
                        "partial_rotary_factor": 0.5},
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
# Of each architecture the settings of its language part, of what sees, and of the whole.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "AyaVisionForConditionalGeneration": ({"model_type": "cohere2", "sliding_window": 9}, SIGLIP, {}),
    "Gemma3ForConditionalGeneration": (
        {"head_dim": 10, "sliding_window": 9, "final_logit_softcapping": 2.0}, VISION, {}
    ),
    "Gemma3nForConditionalGeneration": (
        {"head_dim": 10, "sliding_window": 9, "num_hidden_layers": 3, "num_kv_shared_layers": 1,
         "layer_types": ["full_attention"] * 3, "vocab_size_per_layer_input": VOCAB,
         "hidden_size_per_layer_input": 6, "laurel_rank": 5},
        {"hidden_size": 16, "architecture": "resnet18", "model_args": {}, "vocab_size": 4, "vocab_offset": VOCAB},
        {},
    ),
    "Gemma4ForConditionalGeneration": (
        {"head_dim": 10, "global_head_dim": 12, "sliding_window": 9,
         "layer_types": ["sliding_attention", "full_attention"], "vocab_size_per_layer_input": VOCAB,
         "hidden_size_per_layer_input": 6},
        VISION | {"num_key_value_heads": 2, "head_dim": 8}, {"audio_config": None},
    ),
    "Gemma4UnifiedForConditionalGeneration": (
        {"head_dim": 10, "global_head_dim": 12, "sliding_window": 9,
         "layer_types": ["sliding_attention", "full_attention"]},
        {"patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 16}, {"audio_config": None},
    ),
    "GlmOcrForConditionalGeneration": (AXES | {"head_dim": 8}, QWEN_VISION, {}),
    "Idefics3ForConditionalGeneration": ({"model_type": "llama"}, VISION, {}),
    "InternVLForConditionalGeneration": (
        {"model_type": "qwen2"}, VISION | {"image_size": [28, 28], "patch_size": [14, 14]}, {}
    ),
    "Llama4ForConditionalGeneration": (
        {"intermediate_size_mlp": 40, "head_dim": 10, "num_local_experts": 3, "interleave_moe_layer_step": 2,
         "no_rope_layers": [1, 0], "attention_chunk_size": 9, "floor_scale": 4},
        VISION | {"intermediate_size": 64, "vision_output_dim": 16, "projector_input_dim": 16,
                  "projector_output_dim": 16},
        {},
    ),
    "LightOnOcrForConditionalGeneration": (
        {"model_type": "qwen3", "head_dim": 10}, VISION | {"model_type": "pixtral", "head_dim": 8},
        {"tie_word_embeddings": False},
    ),
    "LlavaForConditionalGeneration": ({"model_type": "llama"}, CLIP, {}),
    "LlavaNextForConditionalGeneration": ({"model_type": "mistral", "head_dim": 10}, CLIP, {}),
    "LlavaOnevisionForConditionalGeneration": ({"model_type": "qwen2"}, SIGLIP, {"tie_word_embeddings": True}),
    "Mistral3ForConditionalGeneration": (
        {"model_type": "mistral", "head_dim": 10}, VISION | {"model_type": "pixtral", "head_dim": 8},
        {"tie_word_embeddings": False},
    ),
    "PaddleOCRVLForConditionalGeneration": (AXES | {"head_dim": 8}, VISION, {}),
    "PaliGemmaForConditionalGeneration": (
        {"model_type": "gemma2", "head_dim": 10, "sliding_window": 9,
         "layer_types": ["sliding_attention", "full_attention"]}, SIGLIP, {"projection_dim": 32},
    ),
    "Qwen2VLForConditionalGeneration": (AXES, {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}, {}),
    "Qwen2_5_VLForConditionalGeneration": (AXES, QWEN_VISION, {"tie_word_embeddings": True}),
    "Qwen3VLForConditionalGeneration": (
        AXES | {"head_dim": 8}, QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, {}
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        AXES | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, {}
    ),
    "Qwen3_5ForConditionalGeneration": (DELTA | {"head_dim": 8}, QWEN_VISION | {"num_position_embeddings": 16}, {}),
    "Qwen3_5MoeForConditionalGeneration": (
        DELTA | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                 "shared_expert_intermediate_size": 20},
        QWEN_VISION | {"num_position_embeddings": 16}, {"tie_word_embeddings": True},
    ),
    "SmolVLMForConditionalGeneration": ({"model_type": "llama"}, VISION, {}),
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A whole model, its folder, and the engine that serves its language part."""

    whole: Any
    path: Path
    engine: Engine


def make_whole(name: str) -> Any:
    text, vision, own = MODELS[name]
    model_class = getattr(transformers, name)
    config = model_class.config_class(text_config=TEXT | text, vision_config=vision, **own)
    config.architectures = [name]
    torch.manual_seed(0)
    with ExitStack() as stack:
        if name.startswith("Gemma3n"):  # whose vision encoder needs a library of its own
            make = transformers.AutoModel.from_config
            stack.enter_context(
                patch.object(
                    transformers.AutoModel,
                    "from_config",
                    lambda config: make(config) if config.model_type == "gemma3n_text" else nn.Linear(2, 2),
                )
            )
        model = model_class(config)
    model.set_attn_implementation("eager")
    fill_randomly(model, 0)
    with torch.no_grad():
        model.get_output_embeddings().weight[EOS] *= 2.2
    model.generation_config = transformers.GenerationConfig(eos_token_id=EOS, pad_token_id=0)
    return model.eval()


@pytest.fixture(scope="module", params=sorted(MODELS))
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    path = tmp_path_factory.mktemp("whole")
    whole = make_whole(request.param)
    whole.save_pretrained(path)
    if "VLMoe" in request.param:
        as_published(path)
    engine = make_engine(path, max_model_len=96, block_size=4)
    yield Subject(whole, path, engine)
    engine.close()


def test_all_of_them_are_here() -> None:
    assert set(MODELS) == ARCHITECTURES


def test_greedy_answers_are_those_of_the_whole(subject: Subject) -> None:
    prompts = [random_prompt(VOCAB, seed, 2 + seed * 7 % 41) for seed in range(10)]
    for number, prompt in enumerate(prompts):
        add(subject.engine, str(number), Job(prompt, SamplingParams(temperature=0.0, max_tokens=TOKENS)))
    answers = finish(subject.engine)
    clear, reasons = 0, set()
    for number, prompt in enumerate(prompts):
        expected = reference.greedy(subject.whole, prompt, [EOS], TOKENS)
        if expected.margin > MIN_MARGIN:
            clear += 1
            answer = answers[str(number)].outputs[0]
            assert answer.token_ids == expected.answers[0].tokens
            reasons.add(answer.finish_reason)
    assert clear >= 5
    assert reasons <= {"stop", "length"}


@torch.no_grad()
def test_log_probabilities_are_those_of_the_whole(subject: Subject) -> None:
    """Most heads leave out the factor or the cap that their language part has alone."""
    prompt = random_prompt(VOCAB, 50, 20)
    add(subject.engine, "0", Job(prompt, SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)))
    (found,) = finish(subject.engine)["0"].outputs[0].logprobs or ()
    expected = subject.whole(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    assert {token: one.logprob for token, one in found.items()} == pytest.approx(
        {token: expected[token].item() for token in found}, abs=1e-4
    )


@torch.no_grad()
def test_hidden_states_are_those_of_the_whole(subject: Subject) -> None:
    lengths = [37, 1, 14]
    prompts = [random_prompt(VOCAB, 1000 + length, length) for length in lengths]
    found = Pages(load(subject.path, max_model_len=96), scattered_tables(lengths), reach=lengths).step(prompts)
    whole = subject.whole
    body = whole.model if hasattr(whole, "model") else whole.language_model.model  # Llama 4 has its head inside
    for prompt, ours in zip(prompts, found, strict=True):
        close(ours, body(input_ids=torch.tensor([prompt])).last_hidden_state[0])


def test_older_names_of_the_weights_are_known(tmp_path: Path) -> None:
    """LLaVA's parts side by side at the top, as it is stored, and below `model`, as transformers has it in memory."""
    whole = make_whole("LlavaForConditionalGeneration")
    whole.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    with safe_open(file, "pt") as stored:
        assert "language_model.model.norm.weight" in set(stored.keys())
    prompt = random_prompt(VOCAB, 3, 9)
    answers = []
    for _ in range(2):
        engine = make_engine(tmp_path, max_model_len=96)
        add(engine, "0", Job(prompt, SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)))
        answers.append(finish(engine)["0"].outputs[0].token_ids)
        engine.close()
        inner = {
            name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head", "lm_head")
            if name.startswith("language_model.")
            else f"model.{name}": tensor
            for name, tensor in load_file(file).items()
        }
        save_file(inner, file, {"format": "pt"})
    assert answers[0] == answers[1]


def test_layers_that_guess_later_tokens_are_left_out(tmp_path: Path) -> None:
    """As Qwen3.5 is published: the layers are beside the model."""
    make_whole("Qwen3_5ForConditionalGeneration").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    assert any(name.startswith("model.language_model.layers.0.linear_attn.") for name in stored)
    save_file(stored | {"mtp.layers.0.self_attn.q_proj.weight": torch.zeros(2, 2)}, file, {"format": "pt"})
    make_engine(tmp_path, max_model_len=96).close()
    save_file(stored | {"mtm.layers.0.self_attn.q_proj.weight": torch.zeros(2, 2)}, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"mtm\.layers\.0"):
        make_engine(tmp_path, max_model_len=96)


def test_a_language_part_that_is_no_family_is_refused(tmp_path: Path) -> None:
    make_whole("LlavaForConditionalGeneration").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["text_config"] = {"model_type": "mamba"}
    file.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"the type 'mamba', which is not supported. Supported: cohere, "):
        make_engine(tmp_path)
