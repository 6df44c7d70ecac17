"""`LLM.embed`, `score`, `classify` and `fill_mask` against transformers' models and pipelines on tiny checkpoints."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.encoder_text import CORPUS, LABELS, bert_config, deberta, roberta, save_model, wordpiece
from support.sentence import pipeline_folder, pooling

from engine import LLM, InvalidRequestError, PoolingParams, RequestFailedError, SamplingParams, TokenInput
from engine.interface.outputs import EngineInfo, Pooled
from engine.pooled import AGGREGATIONS, cosine, labels_of, spans_of
from engine.text.encoding import Encoding
from engine.text.processor import Tokenizer

TEXTS = [CORPUS[0], CORPUS[3], "Ada Ada 😀 in unbelievable London!", "boats", "été à London\n\nCharles"]
PAIRS = [("boats sailed", "the harbour"), (CORPUS[0], "boats"), ("London", "")]
FILLS = ["Ada [MASK] to London", "[MASK] [MASK]  Boats, [PAD] walked the [MASK].", "the engine [MASK] [PAD] 😀"]

# name -> transformers' class and settings of its config
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("BertModel", {}),
    "masked": ("BertForMaskedLM", {}),
    "three": ("BertForSequenceClassification", {"id2label": {0: "bad", 1: "so so", 2: "good"}}),
    "cross": ("BertForSequenceClassification", {"num_labels": 1}),
    "tokens": ("BertForTokenClassification", {"id2label": LABELS}),
}


@pytest.fixture(scope="module")
def hf() -> Any:
    """The tokenizer of all these models."""
    return wordpiece(lower=False)


@pytest.fixture(scope="module")
def model(hf: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[LLM, Any]]]:
    """Gives the model of a name, ours and transformers', loaded once."""
    made: dict[str, tuple[LLM, Any]] = {}

    def get(name: str) -> tuple[LLM, Any]:
        if name not in made:
            kind, settings = MODELS[name]
            folder = tmp_path_factory.mktemp(name)
            theirs = save_model(getattr(transformers, kind), bert_config(hf, **settings), hf, folder)
            made[name] = (load(folder), theirs)
        return made[name]

    yield get
    for llm, _ in made.values():
        assert not llm.engine.has_unfinished_requests()
        llm.engine.check_integrity()
        llm.close()


def load(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **{"device": "cpu", "dtype": "float32", "show_progress": False, **settings})


def run(theirs: Any, hf: Any, *texts: str, **settings: Any) -> Any:
    """The reference's output for one input."""
    with torch.no_grad():
        return theirs(**hf(*[[text] for text in texts], return_tensors="pt", **settings))


def close(mine: Any, theirs: Any) -> None:
    mine, theirs = np.asarray(mine, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    assert mine.shape == theirs.shape
    assert np.abs(mine - theirs).max() <= 1e-5 * max(np.abs(theirs).max(), 1)


def test_vectors(model: Any, hf: Any) -> None:
    llm, theirs = model("plain")
    states = [run(theirs, hf, text).last_hidden_state[0].double() for text in TEXTS]
    expected = {"mean": [s.mean(0) for s in states], "cls": [s[0] for s in states], "last": [s[-1] for s in states]}
    for mode, vectors in expected.items():
        answers = llm.embed(TEXTS, pooling=mode, normalize=False)
        for answer, vector, text in zip(answers, vectors, TEXTS, strict=True):
            close(answer.embedding, vector)
            assert answer.prompt_token_ids == hf(text)["input_ids"]
            assert answer.outputs.embedding is answer.embedding
            assert answer.hidden_size == 32
        for answer, vector in zip(llm.embed(TEXTS, mode, True), vectors, strict=True):
            close(answer.embedding, vector / vector.norm())
        params = PoolingParams(task="embed", pooling=mode, normalize=False)
        for answer, vector in zip(llm.encode(TEXTS, params), vectors, strict=True):
            close(answer.outputs.data, vector)
    for answer, state in zip(llm.encode(TEXTS, pooling_task="token_embed"), states, strict=True):
        close(answer.data, state)
    with pytest.raises(InvalidRequestError, match=r"encode serves embed, .*, not fill_mask"):
        llm.encode("a", pooling_task="fill_mask")
    with pytest.raises(InvalidRequestError, match="pooling_task is embed, but pooling_params has the task classify"):
        llm.encode("a", PoolingParams(task="classify"), pooling_task="embed")
    with pytest.raises(InvalidRequestError, match="cannot serve reward: it has no head that scores texts or tokens"):
        llm.reward("a")
    own = [answer.embedding for answer in llm.embed(TEXTS)]
    close(own, [answer.embedding for answer in llm.embed(TEXTS, "mean", True)])
    short = llm.embed(TEXTS[0], normalize=True, dimensions=5)[0].embedding
    close(short, np.array(own[0][:5]) / np.linalg.norm(own[0][:5]))


def test_every_kind_of_input_is_one_input(model: Any, hf: Any) -> None:
    llm, _ = model("plain")
    ids = hf("boats")["input_ids"]
    expected = llm.embed("boats")[0]
    vllms = ({"prompt": "boats"}, {"prompt_token_ids": ids}, [{"prompt": "boats"}])
    for one in ("boats", ids, tuple(ids), TokenInput(ids), ["boats"], [ids], [TokenInput(ids)], ("boats",), *vllms):
        assert llm.embed(one) == [expected]
    assert [len(answer.prompt_token_ids) for answer in llm.embed(["boats", ids, TokenInput(ids)])] == [len(ids)] * 3
    assert llm.embed([]) == []
    other = llm.embed(TokenInput(ids, token_type_ids=[1] * len(ids)))[0]
    assert np.abs(np.array(other.embedding) - expected.embedding).max() > 1e-2
    for wrong in (None, 3, [None], [["a", 1]], {"text": "a"}, {"prompt": 3}, [True, False], [("a", "b")], b"a", [1.5]):
        with pytest.raises(InvalidRequestError, match="must be a text"):
            llm.embed(wrong)
    with pytest.raises(InvalidRequestError, match="pairs of texts are only for classifiers"):
        llm.embed([("a", "b")])


@pytest.mark.parametrize("name", ["three", "cross"])
def test_classes_of_texts_and_pairs(name: str, model: Any, hf: Any) -> None:
    llm, theirs = model(name)
    inputs: list[Any] = [*TEXTS, *PAIRS, {"text": "a", "text_pair": "b c"}, {"text": "boats"}, ["Ada", "London"]]
    spelled = [*((text,) for text in TEXTS), *PAIRS, ("a", "b c"), ("boats",), ("Ada", "London")]
    activate = torch.sigmoid if name == "cross" else partial(torch.softmax, dim=-1)
    raw = llm.classify(inputs, use_activation=False)
    for mine, plain, texts in zip(llm.classify(inputs), raw, spelled, strict=True):
        logits = run(theirs, hf, *texts).logits[0]
        close(mine.probs, activate(logits))
        close(plain.probs, logits)
        assert mine.prompt_token_ids == hf(*[[text] for text in texts])["input_ids"][0]
        assert [entry.score for entry in mine.labels] == mine.outputs.probs
        assert [entry.label for entry in mine.labels] == list(theirs.config.id2label.values())
        assert mine.label == theirs.config.id2label[int(logits.argmax())]
        assert mine.num_classes == len(mine.probs)
    assert len({answer.probs[0] for answer in raw}) >= len(inputs) - 1  # "boats" came twice
    close([answer.data.tolist() for answer in llm.reward(TEXTS)], [answer.probs for answer in raw[: len(TEXTS)]])
    close([answer.data.tolist() for answer in llm.encode(TEXTS)], [a.probs for a in llm.classify(list(TEXTS))])
    alone = llm.classify(("Ada", "London"))
    assert len(alone) == 1
    close(alone[0].probs, llm.classify([("Ada", "London")])[0].probs)
    assert len(llm.classify(["Ada", "London"])) == 2
    pipe = transformers.pipeline("text-classification", model=theirs, tokenizer=hf, top_k=None)
    for text in TEXTS:
        found = {entry["label"]: entry["score"] for entry in pipe([text])[0]}
        mine = {entry.label: entry.score for entry in llm.classify(text)[0].labels}
        assert mine == pytest.approx(found, abs=1e-5)


def test_a_cross_encoder_scores_pairs(model: Any, hf: Any) -> None:
    llm, theirs = model("cross")

    def expected(first: str, second: str) -> float:
        return float(torch.sigmoid(run(theirs, hf, first, second).logits[0, 0]))

    others = TEXTS[1:]
    one_to_many = llm.score(TEXTS[0], others)
    close([answer.score for answer in one_to_many], [expected(TEXTS[0], other) for other in others])
    assert len({round(answer.score, 4) for answer in one_to_many}) == len(others)
    paired = llm.score(others, TEXTS[:-1])
    close([answer.score for answer in paired], [expected(*both) for both in zip(others, TEXTS[:-1], strict=True)])
    single = llm.score("boats", "London")
    close([answer.score for answer in single], [expected("boats", "London")])
    assert single[0].outputs.score == single[0].score
    assert single[0].prompt_token_ids == hf("boats", "London")["input_ids"]
    assert single[0].score != llm.score("London", "boats")[0].score
    for given, code in (((["a", "b"], ["c"]), "2 and 1"), (([], ["c"]), "0 and 1"), (("a", []), "1 and 0")):
        with pytest.raises(InvalidRequestError, match=code):
            llm.score(*given)
    with pytest.raises(InvalidRequestError, match="must be texts, not token ids"):
        llm.score("a", [[5, 6]])
    cut = llm.score("London", " ".join(["boats"] * 90), truncate_prompt_tokens=20)[0]
    assert cut.prompt_token_ids == hf("London", " ".join(["boats"] * 90), truncation=True, max_length=20)["input_ids"]


def test_vectors_are_compared_and_each_text_is_embedded_once(model: Any, hf: Any) -> None:
    llm, _ = model("plain")
    vectors = {text: np.array(llm.embed(text, normalize=True)[0].embedding) for text in TEXTS}
    before = llm.stats()
    first, second = [TEXTS[0], TEXTS[1], TEXTS[0], TEXTS[2]], [TEXTS[1], TEXTS[0], TEXTS[0], TEXTS[1]]
    answers = llm.score(first, second)
    expected = [float(vectors[a] @ vectors[b]) for a, b in zip(first, second, strict=True)]
    assert [answer.score for answer in answers] == pytest.approx(expected, abs=1e-6)
    assert answers[2].score == pytest.approx(1)
    assert len({round(score, 3) for score in expected}) >= 3
    assert llm.stats().num_finished - before.num_finished == 3
    assert answers[0].prompt_token_ids == hf(TEXTS[0])["input_ids"] + hf(TEXTS[1])["input_ids"]
    assert llm.score("boats", [hf("boats")["input_ids"]])[0].score == pytest.approx(1)
    assert cosine([3.0, 4.0], [4.0, 3.0]) == pytest.approx(0.96)
    assert cosine([0.0, 0.0], [1.0, 2.0]) == 0.0
    assert cosine(Pooled.of(np.float32([[1, 1]])), Pooled.of(np.float32([[-2, -2]]))) == pytest.approx(-1)


def pipeline_spans(pipe: Any, text: str, aggregation: str) -> list[tuple[str, float, int, int]]:
    key = "entity" if aggregation == "none" else "entity_group"
    found = pipe(text, aggregation_strategy=aggregation)
    return [(item[key], float(item["score"]), item["start"], item["end"]) for item in found]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_spans_of_tokens(aggregation: str, model: Any, hf: Any) -> None:
    llm, theirs = model("tokens")
    pipe = transformers.pipeline("token-classification", model=theirs, tokenizer=hf)
    total, joined = 0, 0
    for text, answer in zip(TEXTS, llm.classify(TEXTS, aggregation=aggregation), strict=True):
        expected = pipeline_spans(pipe, text, aggregation)
        assert [(span.label, span.start, span.end) for span in answer.spans] == [(e[0], *e[2:]) for e in expected]
        assert [span.score for span in answer.spans] == pytest.approx([e[1] for e in expected], abs=1e-5)
        assert [span.text for span in answer.spans] == [text[e[2] : e[3]] for e in expected]
        close(answer.probs, run(theirs, hf, text).logits[0].softmax(-1))
        total += len(expected)
        joined += sum(" " in span.text for span in answer.spans)
    assert total >= 5
    assert aggregation == "none" or joined


class Scripted:
    """A token classifier for transformers' pipeline whose logits are given."""

    def __init__(self, logits: Any) -> None:
        self.logits = torch.tensor(logits)[None]

    def __call__(self, **_: Any) -> dict[str, Any]:
        return {"logits": self.logits}


INFO = EngineInfo(
    model="m", model_path="m", dtype="float32", kv_cache_dtype="float32", device="cpu", max_model_len=64,
    vocab_size=300, block_size=0, num_blocks=0, full_requests=0, max_num_seqs=8, max_num_beams=1,
    tasks=("token_classify",), labels=tuple(LABELS.values()),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("make", [wordpiece, roberta, deberta])
def test_spans_of_random_scores(make: Any, model: Any) -> None:
    """Every order of "B-", "I-", others and nothing, over tokenizers that know words and that do not."""
    hf = make()
    tokenizer = Tokenizer(copy.deepcopy(hf))
    _, theirs = model("tokens")
    pipe = transformers.pipeline("token-classification", model=theirs, tokenizer=hf)
    random = np.random.default_rng(3)
    seen: set[str] = set()
    for text in [*TEXTS, "the the the", "", "ĸ London", " ".join(CORPUS)]:
        encoding = tokenizer.encode_input(text)
        for _ in range(6):
            logits = random.normal(0, 2, (len(encoding.ids), len(LABELS))).astype(np.float32)
            pooled = Pooled.of(torch.tensor(logits).softmax(-1).numpy())
            pipe._forward = partial(forward, Scripted(logits))
            for aggregation in AGGREGATIONS:
                expected = pipeline_spans(pipe, text, aggregation)
                mine = spans_of(pooled, encoding, text, tokenizer, INFO, aggregation)
                assert [(s.label, s.start, s.end) for s in mine] == [(e[0], *e[2:]) for e in expected]
                assert [s.score for s in mine] == pytest.approx([e[1] for e in expected], abs=1e-5)
                seen.update(span.label for span in mine)
            everything = spans_of(pooled, encoding, text, tokenizer, INFO, "none", ignore_labels=())
            assert len(everything) == sum(owner == 0 for owner in encoding.sequence)
    assert seen == {*LABELS.values(), "PER", "LOC"} - {"O"}


def forward(scripted: Scripted, inputs: dict[str, Any]) -> dict[str, Any]:
    """What the pipeline's own step returns, with the scripted logits."""
    kept = {
        name: inputs[name] for name in ("input_ids", "special_tokens_mask", "offset_mapping", "sentence", "is_last")
    }
    return {**kept, "logits": scripted()["logits"], "word_ids": None, "word_to_chars_map": None}


def test_spans_without_places(model: Any, hf: Any) -> None:
    llm, _ = model("tokens")
    text = TEXTS[0]
    by_text, by_ids = llm.classify(text, aggregation="none"), llm.classify(hf(text)["input_ids"], aggregation="none")
    assert by_text[0].spans
    assert [s.label for s in by_ids[0].spans] == [s.label for s in by_text[0].spans]
    assert {(s.start, s.end) for s in by_ids[0].spans} == {(None, None)}
    assert by_ids[0].probs == by_text[0].probs
    for name, value in (("aggregation", "sum"), ("aggregation", None)):
        with pytest.raises(InvalidRequestError, match="must be one of none, simple, first, average, max"):
            llm.classify(text, **{name: value})
    with pytest.raises(InvalidRequestError, match="pairs of texts are only for classifiers of whole inputs"):
        llm.classify([("a", "b")])


def test_masks(model: Any, hf: Any) -> None:
    llm, theirs = model("masked")
    pipe = transformers.pipeline("fill-mask", model=theirs, tokenizer=hf)
    for top_k in (1, 5, 40):
        answers = llm.fill_mask(FILLS, top_k=top_k)
        for text, answer in zip(FILLS, answers, strict=True):
            expected = pipe(text, top_k=top_k)
            expected = [expected] if isinstance(expected[0], dict) else expected
            assert len(answer.masks) == len(expected) == text.count("[MASK]")
            for mine, theirs_ in zip(answer.masks, expected, strict=True):
                assert [(m.token_id, m.token, m.sequence) for m in mine] == [
                    (t["token"], t["token_str"], t["sequence"]) for t in theirs_
                ]
                assert [m.score for m in mine] == pytest.approx([t["score"] for t in theirs_], abs=1e-5)
    assert llm.fill_mask(hf(FILLS[1])["input_ids"]) == llm.fill_mask(FILLS[1])
    everything = llm.fill_mask(FILLS[0], top_k=1000)[0].masks[0]
    assert len(everything) == len(hf)
    assert sum(entry.score for entry in everything) == pytest.approx(1, abs=1e-5)
    with pytest.raises(InvalidRequestError, match=r"has no \[MASK\]: write \[MASK\]") as caught:
        llm.fill_mask([FILLS[0], "no gap"])
    assert caught.value.code == "no_mask_token"
    with pytest.raises(InvalidRequestError, match=r"has no \[MASK\] in the part that truncate_prompt_tokens keeps"):
        llm.fill_mask("a b c d e f [MASK]", truncate_prompt_tokens=5)
    with pytest.raises(InvalidRequestError, match="top_k must be"):
        llm.fill_mask(FILLS[0], top_k=0)
    with pytest.raises(InvalidRequestError, match="has no mask token"):
        nameless(llm).fill_mask(FILLS[0])
    assert np.shape(llm.embed(FILLS[0])[0].embedding) == (32,)  # such a model gives vectors, too


@pytest.mark.slow
def test_as_many_masks_as_tokens(hf: Any, tmp_path: Path) -> None:
    """All tokens of a long input are masks, and the last one has the answer of the reference."""
    config = bert_config(hf, max_position_embeddings=1100)
    theirs = save_model(transformers.BertForMaskedLM, config, hf, tmp_path)
    ids = [hf.mask_token_id] * 1100
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].softmax(-1)
    llm = load(tmp_path)
    masks = llm.fill_mask(ids, top_k=1)[0].masks
    assert [row[0].score for row in masks] == pytest.approx(expected.amax(-1).tolist(), abs=3e-5)
    with pytest.raises(InvalidRequestError, match="positions must be no more than the 2 tokens of the input, got 3"):
        llm.engine.add_request("more", ids[:2], PoolingParams(task="fill_mask", positions=[0, 1, 1]))
    llm.close()


def nameless(llm: LLM) -> LLM:
    """The same model with a tokenizer that knows no mask."""
    other = copy.copy(llm)
    other.tokenizer = copy.copy(llm.tokenizer)
    assert other.tokenizer is not None
    other.tokenizer.mask_token_id = None
    return other


def test_too_long_and_cut(model: Any, hf: Any) -> None:
    llm, theirs = model("plain")
    text = " ".join(["boats"] * 30 + ["London"] * 60)
    ids = hf(text)["input_ids"]
    assert len(ids) > 64
    for long in (text, ids):
        with pytest.raises(InvalidRequestError, match="64") as caught:
            llm.embed(["boats", long])
        assert f"{len(ids)} tokens" in str(caught.value)
        assert "truncate_prompt_tokens" in str(caught.value)
        assert not llm.engine.has_unfinished_requests()
    for limit, kept in ((-1, 64), (64, 64), (7, 7)):
        expected = hf(text, truncation=True, max_length=kept)["input_ids"]
        answer = llm.embed([text, ids, "boats"], truncate_prompt_tokens=limit, normalize=False)
        assert answer[0].prompt_token_ids == expected
        assert answer[1].prompt_token_ids == ids[:kept]
        assert answer[2].prompt_token_ids == hf("boats")["input_ids"][:kept]
        with torch.no_grad():
            states = theirs(torch.tensor([expected])).last_hidden_state[0]
        close(answer[0].embedding, states.double().mean(0))
    for wrong in (0, -2, 65, 1.5, True, "8"):
        with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens") as caught:
            llm.embed("boats", truncate_prompt_tokens=wrong)
        assert caught.value.param == "truncate_prompt_tokens"
    with pytest.raises(InvalidRequestError, match="adds 2 special tokens"):
        llm.embed("boats", truncate_prompt_tokens=1)


def test_nothing_is_left_behind(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = model("plain")
    expected = llm.embed(TEXTS)
    for bad in ([10**6], [], TokenInput([5, 6], token_type_ids=[0, 2]), TokenInput([5, 6], token_type_ids=[1])):
        with pytest.raises(InvalidRequestError):
            llm.embed([*TEXTS, bad])
        assert not llm.engine.has_unfinished_requests()
    with pytest.raises(InvalidRequestError, match="dimensions is 33"):
        llm.embed(TEXTS, dimensions=33)
    with pytest.raises(InvalidRequestError, match="pooling must be one of"):
        llm.embed(TEXTS, pooling="median")
    deltas = llm.engine.step_deltas

    def failing() -> Any:
        return [replace(delta, error="out of luck", pooled=None) for delta in deltas()]

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step_deltas", failing)
        with pytest.raises(RequestFailedError, match="out of luck"):
            llm.embed(TEXTS)
    assert not llm.engine.has_unfinished_requests()
    assert llm.embed(TEXTS) == expected


def test_what_a_model_cannot_serve_says_why(model: Any) -> None:
    calls: dict[str, Callable[[LLM], Any]] = {
        "generate": lambda llm: llm.generate("a", SamplingParams(max_tokens=1)),
        "embed": lambda llm: llm.embed("a"),
        "score": lambda llm: llm.score("a", "b"),
        "classify": lambda llm: llm.classify("a"),
        "fill_mask": lambda llm: llm.fill_mask("[MASK]"),
    }
    served = {
        "plain": {"embed", "score"},
        "masked": {"embed", "score", "fill_mask"},
        "three": {"classify"},
        "cross": {"classify", "score"},
        "tokens": {"classify"},
    }
    for name, methods in served.items():
        llm, _ = model(name)
        for method, call in calls.items():
            if method in methods:
                call(llm)
                continue
            with pytest.raises(InvalidRequestError, match=f"cannot serve {method}: .* It serves") as caught:
                call(llm)
            assert caught.value.code == "unsupported_task"
    with pytest.raises(InvalidRequestError, match="has 3 classes"):
        model("three")[0].score("a", "b")


def test_without_a_tokenizer(model: Any, hf: Any) -> None:
    llm, _ = model("plain")
    bare = load(Path(llm.engine.info.model_path), skip_tokenizer_init=True)
    ids = hf("boats")["input_ids"]
    close(bare.embed(ids)[0].embedding, llm.embed(ids)[0].embedding)
    with pytest.raises(InvalidRequestError, match="has no tokenizer, so inputs must be token ids"):
        bare.embed([ids, "boats"])
    bare.close()
    tokens, _ = model("tokens")
    bare = load(Path(tokens.engine.info.model_path), skip_tokenizer_init=True)
    mine, known = bare.classify(ids, aggregation="none")[0], tokens.classify(ids, aggregation="none")[0]
    assert mine.probs == known.probs
    assert {span.text for span in mine.spans} <= {""}
    bare.close()


def test_progress(model: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = model("plain")
    llm.embed(["boats"] * 32)  # stderr is a file
    assert "embedding" not in capfd.readouterr().err
    llm.embed(["boats"] * 2, use_tqdm=True)
    assert "2/2" in capfd.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    llm.embed(["boats"] * 31)
    assert "embedding" not in capfd.readouterr().err
    llm.embed(["boats"] * 32)
    assert "32/32" in capfd.readouterr().err
    llm.score("a", ["b"] * 40, use_tqdm=False)
    assert "embedding" not in capfd.readouterr().err


@pytest.mark.parametrize("mode", ["mean", "lasttoken"])
@pytest.mark.parametrize("include", [True, False])
def test_prompts_and_lower_case(mode: str, include: bool, model: Any, hf: Any, tmp_path: Path) -> None:
    """What sentence-transformers does with a folder that asks for these: the prompt before the text, its tokens
    perhaps left out of the mean, and lower case before all else."""
    plain, theirs = model("plain")
    prompts = {"query": "the Engine: ", "passage": "boats "}
    query, passage = prompts.values()
    folder = pipeline_folder(
        tmp_path / "m",
        Path(plain.engine.info.model_path),
        [pooling(mode, include_prompt=include)],
        settings={"prompts": prompts, "default_prompt_name": "passage"},
        limits={"max_seq_length": 20, "do_lower_case": True},
    )
    llm = load(folder)

    def expected(prompt: str, text: str) -> Any:
        given = (prompt + text).lower()
        states = run(theirs, hf, given, truncation=True, max_length=20).last_hidden_state[0].double()
        skipped = 0 if include or not prompt else len(hf(prompt.lower())["input_ids"]) - 1  # with [CLS], without [SEP]
        return states[-1] if mode == "lasttoken" else states[skipped:].mean(0)

    texts = ["London", "Ada BOATS", " ".join(["Été"] * 40)]
    for name, prompt in ((None, passage), ("query", query), ("passage", passage), ("", "")):
        answers = llm.embed(texts, prompt_name=name, normalize=False, truncate_prompt_tokens=-1)
        for text, answer in zip(texts, answers, strict=True):
            close(answer.embedding, expected(prompt, text))
    assert len(llm.embed(texts[-1], truncate_prompt_tokens=-1)[0].prompt_token_ids) == 20
    assert hf("LONDON")["input_ids"] != hf("london")["input_ids"]  # this tokenizer itself keeps the case
    ids = hf("LONDON")["input_ids"]
    found = llm.embed([ids, "LONDON"], normalize=False)
    assert found[0].prompt_token_ids == ids
    states = run(theirs, hf, "LONDON").last_hidden_state[0].double()
    close(found[0].embedding, states[-1] if mode == "lasttoken" else states.mean(0))
    scored = llm.score("A", "b")[0].prompt_token_ids
    assert scored == [*hf(passage + "a")["input_ids"], *hf(passage + "b")["input_ids"]]
    with pytest.raises(InvalidRequestError, match=r"no prompt named 'title'.* It has query, passage"):
        llm.embed("London", prompt_name="title")
    with pytest.raises(InvalidRequestError, match="It has none"):
        plain.embed("London", prompt_name="query")
    llm.close()


def test_a_decoder_embeds_beside_generating(tmp_path: Path, hf: Any) -> None:
    """By its last token, in pages, with inputs longer than a step."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.LlamaConfig(vocab_size=len(hf), max_position_embeddings=128, num_key_value_heads=2, **shape)
    theirs = save_model(transformers.LlamaForCausalLM, config, hf, tmp_path)
    llm = load(tmp_path, max_num_batched_tokens=8, max_num_seqs=4, num_gpu_blocks_override=64)
    llm.engine.add_request("other", [5, 6, 7], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    for text, answer in zip(TEXTS, llm.embed(TEXTS), strict=True):
        with torch.no_grad():
            state = theirs.model(torch.tensor([hf(text)["input_ids"]])).last_hidden_state[0, -1].double()
        close(answer.embedding, state / state.norm())
    assert max(len(answer.prompt_token_ids) for answer in llm.embed(TEXTS)) > 8
    with pytest.raises(InvalidRequestError, match="cannot serve classify"):
        llm.classify("a")
    llm.engine.check_integrity()
    llm.close()


def test_answers_by_name() -> None:
    info = replace(INFO, tasks=("classify",), labels=("a", "b"))
    scores = Pooled.of(np.float32([[0.25, 0.75]]))
    assert [(entry.label, entry.score) for entry in labels_of(scores, info)] == [("a", 0.25), ("b", 0.75)]
    two = Encoding([5, 6], [0, 0], [(0, 1), (1, 2)], [0, 0])
    flat = Pooled.of(np.full((2, len(LABELS)), 0.1, np.float32))
    assert spans_of(flat, two, "ab", None, INFO, "none") == []  # the first class is "O"
    assert PoolingParams(task="embed").skip_tokens == 0
