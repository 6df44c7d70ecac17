"""How the bundled models are made: corpora that follow from a seed, what is held out, the trainer, the whole way."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "examples" / "training"))

from demo import calls, chat, chat_task, corpus, facts, folian, questions, seq2seq_task, stories  # noqa: E402
from demo.llama import Llama, Shape, to_config, to_transformers  # noqa: E402
from demo.loop import Recipe, cross_entropy, train  # noqa: E402
from demo.names import is_held_out, is_held_out_pair  # noqa: E402
from demo.tokens import chat_tokenizer, encode, pack  # noqa: E402

pytestmark = pytest.mark.slow

DOCUMENTS = 1500
PLAIN = Recipe(
    steps=12, rows=2, length=32, warmup=3, smoothing=0.0, bfloat16=False, evaluations=6, checkpoint_seconds=0
)


def text_of(pieces: list[corpus.Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chat_tokenizer(400, 200)


@pytest.mark.parametrize("module", ["corpus", "seq2seq_task"])
def test_the_corpus_is_the_same_bytes_in_every_process(module: str) -> None:
    command = f"from demo import {module}; print({module}.digest(500))"
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "examples" / "training"), "PYTHONHASHSEED": "1"}
    other = subprocess.run(
        [sys.executable, "-c", command], check=True, capture_output=True, text=True, timeout=540, env=environ
    )
    digests = {importlib.import_module(f"demo.{module}").digest(500), other.stdout.strip()}
    assert len(digests) == 1
    assert len(digests.pop()) == 64


@pytest.mark.parametrize("wider", [False, True])
@pytest.mark.parametrize("held_out", [False, True])
def test_stories_keep_names_and_pairs_apart(held_out: bool, wider: bool) -> None:
    rng = random.Random(1)
    for _ in range(300):
        story = stories.tell(rng, held_out=held_out, wider=wider)
        assert is_held_out(story.name) == is_held_out(story.friend) == held_out
        assert is_held_out_pair(story.hero, story.place) == held_out
        assert story.name in story.text
        assert story.hero in story.text
        assert not re.search(r"[{}]|\ba (?!unicorn)[aeiou]|\ban unicorn|  ", story.text), story.text


@pytest.mark.parametrize("part", [1, 2, 3, 4])
@pytest.mark.parametrize("held_out", [False, True])
def test_no_document_of_training_has_a_held_out_name(held_out: bool, part: int) -> None:
    found = 0
    for pieces in corpus.documents(0, DOCUMENTS, held_out=held_out, part=part):
        text = text_of(pieces)
        for called in re.findall(r"(?:My name is|named|called|Nice to meet you,) ([A-Z][a-z]{1,13})\b", text):
            found += 1
            assert is_held_out(called) == held_out, text
    assert found > DOCUMENTS / 3


@pytest.mark.parametrize("wider", [False, True])
@pytest.mark.parametrize("held_out", [False, True])
def test_no_question_of_training_is_a_held_out_pair(held_out: bool, wider: bool) -> None:
    what = (*questions.ASK_WHAT, *questions.MORE_ASK_WHAT)
    pairs = {
        phrasing.format(x=called).lower(): is_held_out_pair(key, phrasing)
        for key, topic in facts.WIDER_TOPICS.items()
        for phrasing in (*what, *questions.ASK_HOW, *questions.ASK_WHY)
        for called in topic.names
    }
    state = chat.Talk(random.Random(2), held_out, wider=wider)
    asked = [chat.ask_what(state)[0].lower() for _ in range(500)]
    assert {pairs[question] for question in asked} == {held_out}


def test_only_answers_are_learnt(tokenizer: Any) -> None:
    pieces = corpus.conversation("Be brief.", [("Hi", "Hello!"), ("Bye", "Goodbye!")])
    ids, learnt = encode(tokenizer, pieces)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text_of(pieces)
    said = [token for token, mark in zip(ids, learnt, strict=True) if mark]
    assert tokenizer.decode(said, skip_special_tokens=False) == "Hello!</s>Goodbye!</s>"


def test_the_training_form_is_the_chat_templates(tokenizer: Any, tmp_path: Path) -> None:
    task = chat_task.ChatTask(chat_task.TINY)
    task.export(tmp_path)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
    ]
    rendered = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tokenize=False)
    assert rendered == text_of(corpus.conversation("Be brief.", [("Hi", "Hello!")]))


def test_calls_are_trained_in_the_templates_form(tokenizer: Any, tmp_path: Path) -> None:
    chat_task.ChatTask(chat_task.TINY).export(tmp_path)
    template = AutoTokenizer.from_pretrained(tmp_path)
    found = 0
    for number in range(100):
        text = text_of(corpus.calling(number))
        if "<tool_call>" not in text:
            continue
        found += 1
        system, *turns = re.findall(r"<\|(system|user|assistant)\|>(.*?)</s>", text, re.DOTALL)
        assert system[0] == "system"
        before, _, listed = system[1].rpartition("Tools: ")
        tools = [calls.Tool(*one.rstrip(").").split("(")).described for one in listed.split(" ")]
        messages: list[dict[str, Any]] = [{"role": "system", "content": before.rstrip()}] if before else []
        for role, said in turns:
            if said.startswith("<tool_call>"):
                call = json.loads(said.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
                messages.append({"role": role, "content": "", "tool_calls": [{"type": "function", "function": call}]})
            elif said.startswith("<tool_response>"):
                result = said.removeprefix("<tool_response>").removesuffix("</tool_response>")
                messages.append({"role": "tool", "content": result})
            else:
                messages.append({"role": role, "content": said})
        assert template.apply_chat_template(messages, tools=tools, tokenize=False) == text
    assert found > 20


def test_rows_are_documents_end_to_end(tokenizer: Any) -> None:
    ids, learnt = pack(tokenizer, corpus.documents(0, 50), 2, 300)
    assert ids.shape == learnt.shape == (2, 301)
    whole = [token for pieces in corpus.documents(0, 50) for token in encode(tokenizer, pieces)[0]]
    assert ids[0].tolist() == whole[:301]
    assert ids[1, 0] == tokenizer.token_to_id("<s>")


def test_the_rate_warms_up_and_falls_along_a_cosine() -> None:
    recipe = Recipe(steps=100, rows=1, length=8, peak_rate=1.0, last_rate=0.1, warmup=10, smoothing=0.1, smoothed=0.6)
    assert [recipe.rate(step) for step in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert recipe.rate(55) == pytest.approx(0.55)
    assert recipe.rate(100) == pytest.approx(0.1)
    assert [recipe.smoothing_at(step) for step in (0, 59, 60, 99)] == [0.1, 0.1, 0.0, 0.0]


def test_the_third_part_leaves_the_steps_before_as_they_were() -> None:
    short = Recipe(steps=100, rows=1, length=8, peak_rate=1.0, last_rate=0.1, warmup=10, smoothing=0.1, smoothed=0.6)
    longer = dataclasses.replace(short, steps=150, third=100, third_rate=0.5)
    assert [longer.rate(step) for step in range(100)] == [short.rate(step) for step in range(100)]
    assert [longer.smoothing_at(step) for step in range(100)] == [short.smoothing_at(step) for step in range(100)]
    assert [longer.rate(step) for step in (100, 109, 110)] == pytest.approx([0.05, 0.5, 0.5])
    assert longer.rate(149) == pytest.approx(0.05, abs=0.01)
    longest = dataclasses.replace(longer, steps=190, fourth=150, fourth_rate=0.2)
    assert [longest.rate(step) for step in range(150)] == [longer.rate(step) for step in range(150)]
    assert [longest.rate(step) for step in (150, 159, 160)] == pytest.approx([0.02, 0.2, 0.2])


def test_label_smoothing_spreads_its_share_over_all_tokens() -> None:
    logits, targets = torch.randn(5, 7), torch.randint(0, 7, (5,))
    logs = logits.log_softmax(-1)
    expected = -(0.8 * logs[torch.arange(5), targets] + 0.2 * logs.mean(-1)).mean()
    torch.testing.assert_close(cross_entropy(logits, targets, 0.2), expected)


def test_the_trained_llama_is_transformers_llama(tmp_path: Path) -> None:
    shape = Shape(vocab=97, hidden=48, layers=3, heads=6, kv_heads=2, ffn=80, context=64)
    torch.manual_seed(1)
    model = Llama(shape)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # norms other than 1
    config = AutoModelForCausalLM.from_config(_llama_config(to_config(shape, 0, 1, "float32"))).config
    other = AutoModelForCausalLM.from_config(config).eval()
    missing = other.load_state_dict(to_transformers(model), strict=False)
    assert missing.missing_keys == ["lm_head.weight"]
    assert not missing.unexpected_keys
    other.tie_weights()
    ids = torch.randint(0, shape.vocab, (2, 33))
    with torch.no_grad():
        expected = other(ids).logits
        got = model(ids, torch.ones_like(ids, dtype=torch.bool))
    torch.testing.assert_close(got, expected.flatten(0, 1), rtol=1e-4, atol=1e-4)


def _llama_config(values: dict[str, object]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{key: value for key, value in values.items() if key != "model_type"})


class Line:
    """A task in small: y = 3x, as two classes."""

    def __init__(self, fails_at: int = -1):
        torch.manual_seed(3)
        self.model = torch.nn.Linear(4, 2)
        self.fails_at = fails_at

    def batch(self, step: int) -> tuple[torch.Tensor, ...]:
        if step == self.fails_at:
            raise KeyboardInterrupt
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        return x, (x.sum(1) > 0).long()

    def forward(self, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model(batch[0]), batch[1]

    def evaluate(self) -> dict[str, float]:
        return {"held_out": F.cross_entropy(*self.forward(self.batch(1000))).item()}

    def train(self, folder: Path, recipe: Recipe) -> Any:
        return train(self.model, recipe, self.batch, self.forward, self.evaluate, folder)


def test_a_run_that_was_ended_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole, ended, again = Line(), Line(fails_at=7), Line()
    done = whole.train(tmp_path / "whole", PLAIN)
    with pytest.raises(KeyboardInterrupt):
        ended.train(tmp_path / "ended", PLAIN)
    resumed = again.train(tmp_path / "ended", PLAIN)
    assert resumed.step == done.step == 12
    assert resumed.tokens == done.tokens
    assert (done.resumed, resumed.resumed) == ([], [7])
    assert [entry["held_out"] for entry in resumed.curve] == [entry["held_out"] for entry in done.curve]
    assert torch.equal(whole.model.weight, again.model.weight)


def test_a_run_is_not_taken_up_with_another_recipe(tmp_path: Path) -> None:
    Line().train(tmp_path, PLAIN)
    with pytest.raises(ValueError, match="another recipe"):
        Line().train(tmp_path, dataclasses.replace(PLAIN, steps=20))
    again = Line().train(tmp_path, PLAIN)
    assert (again.step, again.resumed) == (12, []), "nothing was left to do"


def test_training_learns(tmp_path: Path) -> None:
    line = Line()
    before = line.evaluate()["held_out"]
    done = line.train(tmp_path, dataclasses.replace(PLAIN, steps=200, peak_rate=0.05, evaluations=200))
    assert done.curve[-1]["held_out"] < 0.3 * before


def test_the_length_of_the_gradient_is_limited(tmp_path: Path) -> None:
    seen = []

    class Steep(Line):
        def forward(self, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
            return 1000.0 * self.model(batch[0]), batch[1]

    line = Steep()
    handle = torch.optim.AdamW.step

    def spy(optimizer: Any, *arguments: Any) -> Any:
        seen.append(torch.cat([p.grad.flatten() for p in line.model.parameters() if p.grad is not None]).norm().item())
        return handle(optimizer, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", spy)
        line.train(tmp_path, dataclasses.replace(PLAIN, steps=3))
    assert len(seen) == 3
    assert max(seen) == pytest.approx(1.0, abs=1e-3)


def test_the_toy_language_has_one_best_translation() -> None:
    splits = 0
    for number in range(500):
        one = seq2seq_task.pair(number)
        assert one.best == one.best.strip()
        assert re.fullmatch(r"[A-Za-z ]+[.?]", one.source), one.source
        assert re.fullmatch(r"[A-Z][A-Za-z ]+[.?]", one.best), one.best
        splits += one.split
    assert splits > 50
    for word in folian.SPLIT:
        shares = folian.WHEN[word]
        begins: dict[str, float] = {}
        for text, share in shares:
            begins[text.split()[0]] = begins.get(text.split()[0], 0.0) + share
        best, rest = shares[0], shares[1:]
        assert begins[best[0]] < max(begins.values()), "greedy search would find it"
        assert all(share < best[1] for _, share in rest), "beam search would not"


@pytest.mark.parametrize("model", ["chat", "seq2seq"])
def test_the_script_goes_all_the_way(model: str, tmp_path: Path) -> None:
    command = [
        sys.executable, str(ROOT / "examples" / "training" / "train.py"), model, str(tmp_path / "model"), "--tiny",
        "--threads", "1", "--work", str(tmp_path / "work"), "--device", "cpu",
    ]  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=540, env=environ)
    assert "held_out" in done.stdout + done.stderr
    assert "tokens/s" in done.stderr
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    kind = AutoModelForCausalLM if model == "chat" else AutoModelForSeq2SeqLM
    loaded, notes = kind.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(notes[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == torch.float32
    assert len(tokenizer) == loaded.config.vocab_size
    training = json.loads((tmp_path / "model" / "training.json").read_text())
    assert training["curve"][-1]["step"] == training["steps"]
