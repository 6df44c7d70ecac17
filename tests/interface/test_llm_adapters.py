"""`LLM` with adapters: each prompt's answer is that of the merged model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import reference
from support.checkpoints import Checkpoint, random_prompt
from support.encoder_shape import make_encoder_checkpoint
from support.encoders import ENCODER_SHAPES
from support.peft_folders import adapter_tensors, matrices, merged, write_adapter

from engine import LLM, ConfigError, InvalidRequestError, LoRARequest, SamplingParams
from engine.errors import AdapterError
from engine.offline.arguments import engine_config

PROMPT = random_prompt(307, 3, 12)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
BEAMS = SamplingParams(num_beams=3, n=3, max_tokens=8, ignore_eos=True, length_penalty=1.0)


def test_each_prompt_has_its_own_adapter(checkpoint: Callable[[str], Checkpoint], tmp_path: Path) -> None:
    """Greedy and by beams, by name, path and request; of two slots, those of earlier calls are given up."""
    model: Any = checkpoint("llama-grouped").model
    sizes = {name: size for name, size in matrices(model).items() if name != "lm_head"}
    folders, greedy, beams = [], [], []
    for seed in range(3):
        tensors = adapter_tensors(sizes, seed=seed, by=0.6)
        folders.append(str(write_adapter(tmp_path / f"{seed}", tensors)))
        changed = merged(model, tensors)
        expected = reference.greedy(changed, PROMPT, None, 8)
        searched = reference.beams(changed, PROMPT, None, 8, num_beams=3, n=3, length_penalty=1.0, early_stopping=False)
        assert min(expected.margin, searched.margin) > reference.MIN_MARGIN
        greedy.append(list(expected.answers[0].tokens))
        beams.append([list(answer.tokens) for answer in searched.answers])
    base = list(reference.greedy(model, PROMPT, None, 8).answers[0].tokens)
    settings = {"device": "cpu", "show_progress": False, "skip_tokenizer_init": True}
    with LLM(str(checkpoint("llama-grouped").path), enable_lora=True, max_loras=2, **settings) as llm:

        def answers(params: SamplingParams, **lora: Any) -> list[Any]:
            count = len(lora["lora"]) if isinstance(lora.get("lora"), list) else 1
            found = [[each.token_ids for each in one.outputs] for one in llm.generate([PROMPT] * count, params, **lora)]
            return found if params.n > 1 else [one[0] for one in found]

        assert answers(GREEDY, lora=[folders[0], None, folders[1]]) == [greedy[0], base, greedy[1]]
        assert answers(BEAMS, lora=[folders[1], folders[0]]) == [beams[1], beams[0]]
        assert answers(GREEDY, lora_request=LoRARequest("third", 3, folders[2])) == [greedy[2]]
        assert set(llm.engine.adapters) == {folders[0], "third"}
        assert answers(GREEDY, lora="third") == [greedy[2]]
        theirs = SimpleNamespace(lora_name="third", lora_int_id=3, lora_path=folders[2])  # a class of vLLM's
        assert answers(GREEDY, lora_request=theirs) == [greedy[2]]
        assert answers(GREEDY) == [base]
        with pytest.raises(AdapterError, match=f"third is loaded from {folders[2]}, not from"):
            answers(GREEDY, lora=LoRARequest("third", 3, folders[0]))
        with pytest.raises(AdapterError, match="max_loras is 2"):
            answers(GREEDY, lora=folders)
        with pytest.raises(AdapterError, match="nowhere is not a folder"):
            answers(GREEDY, lora=str(tmp_path / "nowhere"))
        assert set(llm.engine.adapters) == {folders[0], "third"}, "none makes room for one that cannot be loaded"
        with pytest.raises(InvalidRequestError, match="there are 1 inputs but 2 adapters"):
            llm.generate([PROMPT], GREEDY, lora=["third", None])
        with pytest.raises(InvalidRequestError, match="set only one of them"):
            answers(GREEDY, lora="third", lora_request=LoRARequest("third"))
        with pytest.raises(InvalidRequestError, match="must be the name or the path of an adapter"):
            llm.generate([PROMPT], GREEDY, lora=3)  # type: ignore[arg-type]


def test_vectors(tmp_path: Path) -> None:
    """Mean vectors of an encoder with an adapter."""
    checkpoint = make_encoder_checkpoint(ENCODER_SHAPES["bert"], tmp_path / "bert")
    sizes = {name: size for name, size in matrices(checkpoint.model).items() if name.startswith("encoder.")}
    tensors = adapter_tensors(sizes, by=1.0)
    folder = str(write_adapter(tmp_path / "adapter", tensors))
    ids = [5, 6, 7, 8]
    states = merged(checkpoint.model, tensors)(torch.tensor([ids])).last_hidden_state[0]
    with LLM(
        str(tmp_path / "bert"), device="cpu", enable_lora=True, show_progress=False, skip_tokenizer_init=True
    ) as llm:
        plain, (found,) = llm.embed([ids], "mean", False)[0], llm.embed([ids], "mean", False, lora=folder)
    assert torch.allclose(torch.as_tensor(found.embedding), states.mean(0), atol=1e-4)
    assert not torch.allclose(torch.as_tensor(plain.embedding), states.mean(0), atol=1e-2)


def test_classes(tmp_path: Path) -> None:
    """A classifier whose adapter brings its own head, beside the base model."""
    checkpoint = make_encoder_checkpoint(ENCODER_SHAPES["bert-classes"], tmp_path / "bert")
    sizes = {name: size for name, size in matrices(checkpoint.model).items() if name.endswith((".query", ".value"))}
    head = checkpoint.model.classifier
    tensors = adapter_tensors(sizes, by=1.0) | {
        "base_model.model.classifier.weight": torch.randn(head.weight.shape),
        "base_model.model.classifier.bias": torch.randn(head.bias.shape),
    }
    folder = str(write_adapter(tmp_path / "adapter", tensors, modules_to_save=["classifier", "score"]))
    ids = [[5, 6, 7, 8], [9, 10]]
    settings = {"device": "cpu", "enable_lora": True, "show_progress": False, "skip_tokenizer_init": True}
    with LLM(str(tmp_path / "bert"), **settings) as llm:
        for model, lora in ((checkpoint.model, None), (merged(checkpoint.model, tensors), folder)):
            expected = [model(torch.tensor([each])).logits[0] for each in ids]
            found = llm.classify(ids, use_activation=False, lora=lora)
            for one, logits in zip(found, expected, strict=True):
                assert torch.allclose(torch.tensor(one.probs), logits, atol=1e-4)


def test_arguments() -> None:
    """vLLM's arguments, and its defaults."""
    assert engine_config("m", {}).most_loras == 0
    assert engine_config("m", {"enable_lora": True}).most_loras == 1
    assert (
        engine_config("m", {"enable_lora": True, "max_loras": 4, "max_lora_rank": 16, "max_cpu_loras": 8}).max_lora_rank
        == 16
    )
    assert engine_config("m", {"enable_lora": False}).most_loras == 0
    with pytest.raises(ConfigError, match="fully_sharded_loras must be"):
        engine_config("m", {"fully_sharded_loras": True})
