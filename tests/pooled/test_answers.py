"""`LLM.answer` against transformers' question-answering pipeline: tokenizers of several kinds, windows that overlap,
whole words and parts of them, answers that there are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import transformers
from support.answering import reference_answers
from support.encoder_text import CORPUS, deberta, roberta, save_model, wordpiece, xlmr

from engine import LLM, InvalidRequestError
from engine.interface.outputs import EngineInfo
from engine.pooled import AnswerTerms, read_question, windows_of
from engine.text.tokenizer import Tokenizer

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
QUESTIONS = ["Who wrote to Charles Babbage?", "where was nobody waiting", "été?"]
CONTEXTS = [CORPUS[0], f"{CORPUS[1]}. {CORPUS[3]} {CORPUS[0]} {CORPUS[1]} Ada ADA", "😀 Ωμέγα, naïve façade"]


def without_segments() -> Any:
    """A tokenizer that says nothing of segments, for a model that finds them itself."""
    hf = wordpiece()
    hf.model_input_names = ["input_ids", "attention_mask"]
    return hf


MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], Any]]] = {
    "bert": ("BertForQuestionAnswering", {"max_position_embeddings": 128}, wordpiece),
    "ernie": ("ErnieForQuestionAnswering", {"max_position_embeddings": 128}, wordpiece),
    "albert": ("AlbertForQuestionAnswering", {"max_position_embeddings": 128, "embedding_size": 16}, wordpiece),
    "big-bird": (
        "BigBirdForQuestionAnswering",
        {"max_position_embeddings": 128, "attention_type": "original_full", "sep_token_id": 3},
        without_segments,
    ),
    "roberta": ("RobertaForQuestionAnswering", {"max_position_embeddings": 200, "pad_token_id": 1}, roberta),
    "xlmr": ("XLMRobertaForQuestionAnswering", {"max_position_embeddings": 130, "pad_token_id": 1}, xlmr),
    "deberta-v3": (
        "DebertaV2ForQuestionAnswering",
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 16, "type_vocab_size": 2},
        deberta,
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any, Any]]:
    """Ours, transformers', and the tokenizer."""
    kind, settings, make = MODELS[request.param]
    folder, hf = tmp_path_factory.mktemp(request.param), make()
    theirs_class = getattr(transformers, kind)
    theirs = save_model(theirs_class, theirs_class.config_class(vocab_size=len(hf), **SIZE, **settings), hf, folder)
    llm = LLM(str(folder), device="cpu", dtype="float32", show_progress=False)
    yield llm, theirs, hf
    assert not llm.engine.has_unfinished_requests()
    llm.close()


def same(ours: Any, theirs: list[dict[str, Any]]) -> None:
    assert [(a.answer, a.start, a.end) for a in ours.answers] == [(a["answer"], a["start"], a["end"]) for a in theirs]
    assert [a.score for a in ours.answers] == pytest.approx([a["score"] for a in theirs], rel=1e-4, abs=1e-9)


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"top_k": 5},
        {"top_k": 4, "align_to_words": False, "max_answer_len": 3},
        {"top_k": 3, "handle_impossible_answer": True},
        {"top_k": 6, "max_seq_len": 48, "doc_stride": 7, "handle_impossible_answer": True},
        {"top_k": 3, "max_seq_len": 40, "doc_stride": 0, "max_answer_len": 1},
        {"top_k": 40, "max_seq_len": 64, "doc_stride": 20, "align_to_words": False},
    ],
    ids=str,
)
def test_answers_are_the_pipelines(model: tuple[LLM, Any, Any], terms: dict[str, Any]) -> None:
    llm, theirs, hf = model
    limits = {"max_seq_len": min(llm.engine.info.max_model_len, 384)}
    limits["doc_stride"] = min(limits["max_seq_len"] // 2, 128)
    pairs = [(question, context) for question in QUESTIONS for context in CONTEXTS]
    found = llm.answer(*map(list, zip(*pairs, strict=True)), **terms)
    for (question, context), answer in zip(pairs, found, strict=True):
        same(answer, reference_answers(theirs, hf, question, context, **(limits | terms)))
    assert any(answer.num_windows > 2 for answer in found) == (terms.get("max_seq_len") is not None)
    assert len({answer.answers[0].answer for answer in found}) > 2


def test_one_question_of_many_texts_and_many_of_one(model: tuple[LLM, Any, Any]) -> None:
    llm, _, _ = model
    alone = [llm.answer(QUESTIONS[0], context)[0] for context in CONTEXTS]
    assert llm.answer(QUESTIONS[0], CONTEXTS) == alone
    assert llm.answer(QUESTIONS, CONTEXTS[1])[0] == alone[1]
    assert llm.answer(QUESTIONS, CONTEXTS)[0] == alone[0]
    assert llm.engine.info.tasks == ("answer",)


@pytest.mark.parametrize(
    ("question", "context", "terms", "words"),
    [
        ("", "a", {}, "the question is empty"),
        ("a", "", {}, "the context is empty"),
        (["a", "b"], ["a", "b", "c"], {}, "2 and 3"),
        ([], "a", {}, "non-empty"),
        (3, "a", {}, "must be a text"),
        ("a", "b", {"top_k": 0}, "top_k must be at least 1"),
        ("a", "b", {"max_answer_len": 0}, "max_answer_len must be at least 1"),
        ("a", "b", {"max_seq_len": 9999}, "max_seq_len is 9999, but this model takes at most"),
        ("a", "b", {"max_seq_len": 30, "doc_stride": 30}, "smaller than a window of 30 tokens"),
        ("boats " * 30, "boats " * 30, {"max_seq_len": 30}, "the question is too long"),
        ("a", "boats " * 50000, {"max_seq_len": 30, "doc_stride": 24}, "at most 4096 windows are allowed"),
    ],
)
def test_what_cannot_be_answered(
    model: tuple[LLM, Any, Any], question: Any, context: Any, terms: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        model[0].answer(question, context, **terms)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("size", "stride"), [(40, 3), (33, 0), (45, 12), (500, 1)])
def test_windows_are_those_of_the_tokenizers_library(side: Any, size: int, stride: int) -> None:
    hf = wordpiece()
    hf.truncation_side = side
    expected = hf(
        QUESTIONS[0], CONTEXTS[1], truncation="only_second", max_length=size, stride=stride,
        return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip
    tokenizer = Tokenizer(hf)
    windows = windows_of(read_question(tokenizer, QUESTIONS[0], CONTEXTS[1]), size, stride, side)
    assert [window.ids for window in windows] == expected["input_ids"]
    assert [window.offsets for window in windows] == expected["offset_mapping"]
    assert [window.type_ids for window in windows] == expected["token_type_ids"]
    assert (len(windows) > 1) == (size < 500)


def test_tokenizers_that_know_no_places_are_refused() -> None:
    class Slow:
        """One written in Python."""

        is_fast = False
        all_special_ids: tuple[int, ...] = ()
        all_special_tokens: tuple[str, ...] = ()
        eos_token_id = bos_token_id = None
        model_input_names = ("input_ids",)

        def __len__(self) -> int:
            return 256

        def encode(self, text: str, **_: Any) -> list[int]:
            return list(text.encode())

        def build_inputs_with_special_tokens(self, *parts: list[int]) -> list[int]:
            return [token for part in parts for token in part]

    with pytest.raises(InvalidRequestError, match=r"Add a tokenizer\.json"):
        read_question(Tokenizer(Slow()), "a", "b")


def test_windows_fit_the_model() -> None:
    info = EngineInfo.__new__(EngineInfo)
    object.__setattr__(info, "max_model_len", 100)
    assert AnswerTerms().window(info) == (100, 50)
    object.__setattr__(info, "max_model_len", 4096)
    assert AnswerTerms().window(info) == (384, 128)
    assert AnswerTerms(max_seq_len=4096).window(info) == (4096, 128)
