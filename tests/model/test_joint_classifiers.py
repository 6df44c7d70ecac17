"""Classifiers over an encoder and a decoder that both read the text (bart-large-mnli, say), against `transformers`:
in a batch, alone, with the decoder's part in chunks, and off the pages in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.checkpoints import random_prompt
from support.driving import check_idle, make_engine, preempt_all, watching
from support.encoder_text import save_model, t5
from support.family_shape import fill_randomly
from support.pages import close
from support.pooling_api import PoolingApi
from support.seq2seq_shapes import BART, GATED, T5
from support.text_encoders import TextEncoder

from engine import Engine, InvalidRequestError, PoolingParams, SamplingParams
from engine.errors import UnsupportedModelError
from engine.model.families import describe

END, PAD, START, VOCAB = 7, 1, 5, 97
LENGTHS = (1, 23, 200, 5, 70, 9)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5ForSequenceClassification", T5),
    "t5-apart": ("T5ForSequenceClassification", T5 | {"tie_word_embeddings": False, "num_labels": 1}),
    "mt5": ("MT5ForSequenceClassification", T5 | GATED),
    "bart": ("BartForSequenceClassification", BART),
    "bart-scaled": ("BartForSequenceClassification", BART | {"scale_embedding": True, "encoder_layers": 3}),
    "plbart": ("PLBartForSequenceClassification", BART),
    "mvp": ("MvpForSequenceClassification", BART),
    "mbart": ("MBartForSequenceClassification", BART),
    "mbart-with-start": ("MBartForSequenceClassification", BART | {"decoder_start_token_id": 3, "num_labels": 2}),
}


@dataclass(frozen=True)
class Subject:
    """A checkpoint, and the reference with the same weights."""

    path: Path
    model: Any

    def prompts(self) -> list[list[int]]:
        """Texts that end with EOS, and one that goes on after it."""
        found = [[*random_prompt(VOCAB, 50 + length, length), END] for length in LENGTHS]
        found = [[token for token in prompt if token != PAD] for prompt in found]
        return [*found, [*found[3], *found[1][:6]]]

    def logits(self, prompt: list[int]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = self.model(torch.tensor([prompt])).logits
        return found

    def engine(self, **settings: Any) -> Engine:
        return make_engine(self.path, **({"max_model_len": 224, "block_size": 4, "max_num_seqs": 8} | settings))


@pytest.fixture(scope="module", params=MODELS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    name, settings = MODELS[request.param]
    kind, path = getattr(transformers, name), tmp_path_factory.mktemp(request.param)
    special = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": START, "num_labels": 3}
    model = kind(kind.config_class(vocab_size=VOCAB, **(special | settings)))
    model.set_attn_implementation("eager")
    fill_randomly(model.eval(), 3)
    model.save_pretrained(path)
    return Subject(path, model)


def classes(engine: Engine, prompts: list[list[int]], strikes: int = 0) -> tuple[list[torch.Tensor], list[Any]]:
    """The head's numbers of each; so often, after every second step, all requests lose their pages."""
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, PoolingParams(task="classify", use_activation=False))
    found: dict[str, Any] = {}
    with watching(engine) as plans:
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step() if output.finished}
            engine.check_integrity()
            if strikes and len(plans) % 2 == 0:
                strikes -= 1
                preempt_all(engine)
    check_idle(engine)
    return [torch.tensor(found[str(number)].pooled.values()) for number in range(len(prompts))], plans


def test_classes_equal_reference(subject: Subject) -> None:
    prompts = subject.prompts()
    expected = [subject.logits(prompt) for prompt in prompts]
    assert len({tuple(row[0].tolist()) for row in expected}) == len(expected)
    engine = subject.engine()
    assert engine.info.tasks == ("classify",)
    for mine, theirs in zip(classes(engine, prompts)[0], expected, strict=True):
        close(mine, theirs)
    for prompt, theirs in zip(prompts, expected, strict=True):
        close(classes(engine, [prompt])[0][0], theirs)
    with pytest.raises(InvalidRequestError, match=f"no token {END}"):
        engine.add_request("none", [9, 10], PoolingParams(task="classify"))
    with pytest.raises(InvalidRequestError, match="cannot serve generate: it has no language-model head"):
        engine.add_request("none", [9, 7], SamplingParams())
    with pytest.raises(InvalidRequestError, match="cannot serve embed: its head does not return vectors"):
        engine.add_request("none", [9, 7], PoolingParams())
    engine.close()


def test_on_few_pages_in_chunks_and_preempted(subject: Subject) -> None:
    prompts = subject.prompts()
    expected = [subject.logits(prompt) for prompt in prompts]
    engine = subject.engine(max_num_batched_tokens=208, num_gpu_blocks_override=150)
    found, plans = classes(engine, prompts, strikes=3)
    for mine, theirs in zip(found, expected, strict=True):
        close(mine, theirs)
    assert any(row.start > 0 for plan in plans for row in plan.pooling)
    assert engine.stats().num_preemptions > 0
    engine.close()


def test_over_http_with_pairs(tmp_path: Path) -> None:
    """A premise and a hypothesis."""
    tokenizer = t5()
    special = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    labels = {0: "contradiction", 1: "neutral", 2: "entailment"}
    config = transformers.T5Config(vocab_size=len(tokenizer), id2label=labels, **special, **T5)
    model = save_model(transformers.T5ForSequenceClassification, config, tokenizer, tmp_path)
    api = PoolingApi(TextEncoder(tmp_path, model, tokenizer))
    pair = {"text": "boats sailed from the harbour", "text_pair": "nobody walked"}
    body = api.ask("/v1/classify", input=[pair, "Ada Lovelace wrote"])
    for item, texts in zip(body["data"], [tuple(pair.values()), ("Ada Lovelace wrote",)], strict=True):
        with torch.no_grad():
            expected = model(**tokenizer(*texts, return_tensors="pt")).logits[0].softmax(-1)
        assert item["probs"] == pytest.approx(expected.tolist(), abs=1e-5)
        assert item["label"] == labels[int(expected.argmax())]
    error = api.refused("/v1/completions", prompt="a")
    assert error["code"] == "unsupported_endpoint"


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"decoder_start_token_id": None}, "decoder_start_token_id"), ({"eos_token_id": [1, 2]}, "eos_token_id")],
)
def test_what_cannot_be_read(changes: dict[str, Any], words: str) -> None:
    config = transformers.BartConfig(architectures=["BartForSequenceClassification"], **changes)
    with pytest.raises(UnsupportedModelError, match=words):
        describe(config)
    config = transformers.MarianConfig(architectures=["MarianForSequenceClassification"])
    with pytest.raises(UnsupportedModelError, match="not supported"):
        describe(config)
