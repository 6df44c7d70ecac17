"""The bundled demo model: small, loadable by transformers, able to end, and made again byte for byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "server" / "demo" / "chat"
FILES = {
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    loaded, notes = AutoModelForCausalLM.from_pretrained(FOLDER, output_loading_info=True)
    assert not any(notes[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return loaded.eval()


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> torch.Tensor:
    messages = [{"role": "user", "content": "What is a choir?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: torch.Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    return ids


def generate(model: Any, prompt: torch.Tensor, **options: Any) -> list[list[int]]:
    mask = torch.ones_like(prompt)
    rows = model.generate(prompt, attention_mask=mask, max_new_tokens=256, top_k=0, **options)
    return [row[prompt.shape[1] :].tolist() for row in rows]


def test_it_is_small_and_complete() -> None:
    assert {file.name for file in FOLDER.iterdir()} == FILES
    assert (FOLDER / "model.safetensors").stat().st_size < 1_500_000
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 1_600_000


def test_its_card_says_what_it_is() -> None:
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert "untrained noise" in card
    assert "never trained" in card


def test_it_is_a_float32_llama_with_grouped_heads(model: Any) -> None:
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.float32
    assert model.config.num_key_value_heads < model.config.num_attention_heads


@pytest.mark.parametrize(
    "text", ["the quiet river", "Hello, world! 123", "naïve ☃ 日本語", "  two  spaces\n\tand a tab ", "\x00\x7f", "🙂"]
)
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < tokenizer.vocab_size == 1280


def test_a_prompt_starts_with_bos(tokenizer: Any) -> None:
    assert tokenizer("the river").input_ids[0] == tokenizer.bos_token_id


def test_the_chat_template_marks_every_turn(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<s><|system|>Be brief.</s><|user|>Hi</s><|assistant|>Hello.</s><|user|>Bye</s><|assistant|>"
    closed = tokenizer.apply_chat_template(messages, tokenize=False)
    assert closed == text.removesuffix("<|assistant|>")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.eos_token_id) == len(messages)
    assert tokenizer.unk_token_id not in ids


def test_the_chat_template_refuses_other_roles(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="system, user and assistant"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_it_ends_by_itself(model: Any, tokenizer: Any, prompt: torch.Tensor) -> None:
    torch.manual_seed(0)
    samples = generate(model, prompt.repeat(16, 1), do_sample=True)
    ended = [sample.index(tokenizer.eos_token_id) for sample in samples if tokenizer.eos_token_id in sample]
    assert len(ended) >= 6, f"{len(ended)} of 16 samples ended within 256 tokens"
    assert sum(ended) / len(ended) > 10, "it ends before it has said anything"


def test_it_speaks_in_printable_words(model: Any, tokenizer: Any, prompt: torch.Tensor) -> None:
    torch.manual_seed(1)
    for sample in generate(model, prompt.repeat(8, 1), do_sample=True):
        text = tokenizer.decode(sample, skip_special_tokens=True)
        assert text.isprintable()
        assert text.isascii()
        assert text[0].isupper()


def test_the_ways_of_decoding_differ(model: Any, prompt: torch.Tensor) -> None:
    torch.manual_seed(2)
    greedy, sampled = generate(model, prompt, do_sample=False), generate(model, prompt, do_sample=True)
    beam = generate(model, prompt, do_sample=False, num_beams=4)
    assert len({tuple(answer[0]) for answer in (greedy, sampled, beam)}) == 3


def test_making_it_again_gives_the_same(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "make_demo_model.py"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    assert {file.name for file in tmp_path.iterdir()} == FILES
    for name in sorted(FILES - {"model.safetensors"}):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes(), name
    again, bundled = load_file(tmp_path / "model.safetensors"), load_file(FOLDER / "model.safetensors")
    assert again.keys() == bundled.keys()
    assert all(torch.equal(again[name], bundled[name]) for name in bundled)


def test_its_files_agree_on_the_special_tokens(tokenizer: Any) -> None:
    for name in ("config.json", "generation_config.json"):
        config = json.loads((FOLDER / name).read_text(encoding="utf-8"))
        assert (config["bos_token_id"], config["eos_token_id"]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
