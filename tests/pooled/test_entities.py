"""`LLM.entities`: GLiNER against its definition written out over transformers' encoders, and against its library where
that is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.encoder_text import CORPUS, modernbert, wordpiece, xlmr
from support.entities import ENCODER, END, MARK, SETTINGS, GlinerFolder, make_gliner

from engine import LLM, InvalidRequestError, quantise_checkpoint
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.interface.request import PoolingParams

LABELS = ["person", "city", "engine part", "red boats", "Wörter"]
TEXTS = [*CORPUS, "x", "and   some-thing_else 's", "\u200b here", "  "]
BERT = {
    "model_type": "bert",
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
SHAPES: dict[str, dict[str, Any]] = {
    "deberta": {},
    "several-layers": {"num_rnn_layers": 2, "hidden_size": ENCODER["hidden_size"]},
    "no-recurrence": {"num_rnn_layers": 0, "max_width": 6},
    "bert": {"encoder": BERT, "tokenizer": wordpiece, "seed": 0},
    "xlm-roberta": {"encoder": BERT | {"model_type": "xlm-roberta", "pad_token_id": 1}, "tokenizer": xlmr},
    "modernbert": {
        "encoder": BERT
        | {"model_type": "modernbert", "hidden_size": 32}
        | {"pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
        "tokenizer": modernbert,
    },
}
ASKED: list[dict[str, Any]] = [
    {},
    {"threshold": 0.3, "flat_ner": False},
    {"threshold": 0.2, "multi_label": True},
    {"threshold": 0.1, "flat_ner": False, "multi_label": True},
]


def loaded(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), device="cpu", dtype="float32", show_progress=False, **settings)


def same(found: Any, wanted: list[dict[str, Any]]) -> None:
    ours = [{name: getattr(entity, name) for name in entity.__dataclass_fields__} for entity in found]
    assert [{**entity, "score": 0} for entity in ours] == [{**entity, "score": 0} for entity in wanted]
    assert [entity["score"] for entity in ours] == pytest.approx([entity["score"] for entity in wanted], abs=1e-4)


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any]]:
    reference = make_gliner(tmp_path_factory.mktemp(request.param), **SHAPES[request.param])
    llm = loaded(reference.path)
    yield llm, reference
    llm.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, GlinerFolder]]:
    reference = make_gliner(tmp_path_factory.mktemp("plain"))
    llm = loaded(reference.path)
    yield llm, reference
    llm.close()


@pytest.mark.parametrize("asked", ASKED)
def test_the_entities_are_the_definitions(shape: tuple[LLM, GlinerFolder], asked: dict[str, Any]) -> None:
    llm, reference = shape
    count = 0
    for text, output in zip(TEXTS, llm.entities(TEXTS, [*LABELS, LABELS[0]], **asked), strict=True):
        same(output.entities, reference.entities(text, LABELS, **asked))
        assert output.num_windows == (1 if text.strip() else 0)
        count += len(output.entities)
    assert count > 20


def test_every_score_is_the_definitions(plain: tuple[LLM, GlinerFolder]) -> None:
    """Whatever other inputs of the step ask for."""
    llm, reference = plain
    engine = llm.engine
    wanted = []
    for number, text in enumerate(CORPUS):
        ids, firsts, words = reference.read(text, LABELS[: number + 1])
        marks = [at for at, token in enumerate(ids) if token == reference.model.mark]
        params = PoolingParams(task="entities", positions=marks, words=firsts, threshold=0.0)
        engine.add_request(str(number), ids, params)
        wanted.append((reference.model.probabilities(ids, firsts), len(words), number + 1))
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output.pooled for output in engine.step() if output.finished}
    for number, (scores, words, labels) in enumerate(wanted):
        pooled = found[str(number)]
        width = SETTINGS["max_width"]
        keys = [(first, last, label) for first, last, label in scores]
        assert pooled.token_ids()[0].tolist() == [(a * width + b - a) * labels + c for a, b, c in keys]
        assert torch.allclose(torch.tensor(pooled.values()[0]), torch.tensor(list(scores.values())), atol=1e-5)
        assert max(first for first, _, _ in keys) == words - 1


def test_a_long_text_is_read_in_windows(tmp_path: Path) -> None:
    """Each window is read as a text of its own, and of spans that stand in two the higher score counts."""
    reference = make_gliner(tmp_path, max_len=20)
    llm = loaded(tmp_path)
    text = " ".join(CORPUS)
    (output,) = llm.entities(text, LABELS[:2], threshold=0.6, stride=7)
    ids, firsts, words = reference.read(text, LABELS[:2])
    begins = list(range(0, len(words) - 7, 13))
    assert output.num_windows == len(begins) > 3
    best: dict[tuple[int, int], float] = {}
    for begin in begins:
        end = min(begin + 20, len(words))
        prompt = firsts[0]
        inner = ids[firsts[begin] : firsts[end] if end < len(words) else len(ids) - 1]
        moved = [at - firsts[begin] + prompt for at in firsts[begin:end]]
        scores = reference.model.probabilities([*ids[:prompt], *inner, ids[-1]], moved)
        for (first, last, _), score in scores.items():
            span = begin + first, begin + last
            best[span] = max(score, best.get(span, 0.0))
    taken: list[tuple[int, int]] = []
    for first, last in sorted(best, key=lambda span: -best[span]):
        if best[first, last] > 0.6 and all(first > other[1] or other[0] > last for other in taken):
            taken.append((first, last))
    assert [(entity.start, entity.end) for entity in output.entities] == [
        (words[first].start(), words[last].end()) for first, last in sorted(taken)
    ]
    assert len(taken) > 5
    (narrow,) = llm.entities(text, LABELS[:2], stride=2)
    assert narrow.num_windows < output.num_windows
    llm.close()


def test_a_window_has_as_many_tokens_as_the_model_takes(plain: tuple[LLM, GlinerFolder]) -> None:
    llm, reference = plain
    assert llm.engine.info.max_model_len == 4 * SETTINGS["max_len"] > ENCODER["max_position_embeddings"]
    llm = loaded(reference.path, max_model_len=24)
    (output,) = llm.entities(CORPUS[1], LABELS[:1], stride=1)
    assert output.num_windows > 1
    with pytest.raises(InvalidRequestError, match=r"leave \d+ of 24 tokens \(max_model_len\) for the text") as refused:
        llm.entities(CORPUS[0], [*LABELS, "a", "b", "c", "d"])
    assert (refused.value.param, refused.value.code) == ("labels", "context_length_exceeded")
    llm.close()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"labels": []}, "labels must be a non-empty list of texts"),
        ({"labels": "person"}, "labels must be a non-empty list of texts"),
        ({"labels": ["a", " "]}, "not blank, got ' '"),
        ({"labels": [f"a {MARK}"]}, f"must not hold {MARK}"),
        ({"labels": [f"{END}a"]}, f"must not hold {END}"),
        ({"labels": [str(n) for n in range(1001)]}, "1 to 1000 different texts, got 1001"),
        ({"texts": []}, "texts must be a non-empty list of texts"),
        ({"texts": ["a\ud800"]}, "unpaired surrogate"),
        ({"threshold": 1.5}, "threshold must be at least 0 and at most 1, got 1.5"),
        ({"stride": -1}, "stride must be at least 0"),
        ({"flat_ner": 1}, "flat_ner must be true or false, got 1"),
    ],
)
def test_what_is_refused(plain: tuple[LLM, GlinerFolder], asked: dict[str, Any], message: str) -> None:
    llm, _ = plain
    with pytest.raises(InvalidRequestError, match=message):
        llm.entities(**({"texts": "a", "labels": ["b"]} | asked))
    assert not llm.engine.has_unfinished_requests()


def test_a_label_without_tokens(tmp_path: Path) -> None:
    llm = loaded(make_gliner(tmp_path, **SHAPES["bert"]).path)
    with pytest.raises(InvalidRequestError, match="label 1 has no tokens"):
        llm.entities("a", ["b", "\u200b"])
    llm.close()


def test_places_that_no_input_has(plain: tuple[LLM, GlinerFolder]) -> None:
    llm, _ = plain
    for changes, message in (
        ({"words": [9]}, "words must be below the 3 tokens"),
        ({"words": None}, "entities needs the positions of labels and of words"),
        ({"words": [-1]}, "words must hold integers of at least 0"),
        ({"positions": [0, 1, 2, 1]}, "positions must be no more than the 3 tokens"),
    ):
        terms: dict[str, Any] = {"positions": [0], "words": [1]} | changes
        with pytest.raises(InvalidRequestError, match=message):
            llm.engine.add_request("a", [1, 2, 3], PoolingParams(task="entities", **terms))
    with pytest.raises(InvalidRequestError, match=r"cannot serve embed.*It serves entities"):
        llm.embed("a")


def test_a_tokenizer_of_another_model(tmp_path: Path, plain: tuple[LLM, GlinerFolder]) -> None:
    _, reference = plain
    wordpiece().save_pretrained(tmp_path)
    llm = loaded(reference.path, tokenizer=str(tmp_path))
    with pytest.raises(InvalidRequestError, match=f"does not read {MARK} as the token {reference.model.mark}"):
        llm.entities("a", ["b"])
    llm.close()


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"span_mode": "token_level"}, UnsupportedModelError, "span_mode is 'token_level', but must be 'markerV0'"),
        ({"span_mode": "marker"}, UnsupportedModelError, "span_mode is 'marker'"),
        ({"model_type": "gliner_bi_encoder_span"}, UnsupportedModelError, "model_type is 'gliner_bi_encoder_span'"),
        ({"labels_encoder": "bge"}, UnsupportedModelError, "labels_encoder is 'bge', but must be None"),
        ({"labels_decoder": "gpt2"}, UnsupportedModelError, "labels_decoder is 'gpt2'"),
        ({"relations_layer": "dot"}, UnsupportedModelError, "relations_layer is 'dot'"),
        ({"span_encoder_config": {}}, UnsupportedModelError, "span_encoder_config"),
        ({"subtoken_pooling": "mean"}, UnsupportedModelError, "subtoken_pooling is 'mean'"),
        ({"words_splitter_type": "spacy"}, UnsupportedModelError, "words_splitter_type is 'spacy'"),
        ({"embed_ent_token": False}, UnsupportedModelError, "embed_ent_token is False"),
        ({"fuse_layers": True}, UnsupportedModelError, "fuse_layers is True"),
        ({"post_fusion_schema": "l2l"}, UnsupportedModelError, "post_fusion_schema is 'l2l'"),
        ({"precomputed_prompts_mode": True}, UnsupportedModelError, "precomputed_prompts_mode is True"),
        ({"class_token_index": 10**6}, UnsupportedModelError, "class_token_index is 1000000"),
        ({"ent_token": 5}, UnsupportedModelError, "ent_token must be the text of a token"),
        ({"hidden_size": 25}, UnsupportedModelError, "hidden_size is 25, but must be even"),
        ({"hidden_size": 48}, ModelLoadError, "should have shape"),
        ({"num_rnn_layers": 2}, ModelLoadError, "lacks tensors that its config requires: rnn.lstm.weight_ih_l1"),
        ({"num_rnn_layers": 0}, ModelLoadError, "do not match its config: rnn.lstm"),
        ({"max_width": 10**9}, ModelLoadError, "max_width must be an integer from 1 to 128"),
        ({"max_len": None}, ModelLoadError, "max_len must be an integer from 1 to 8192"),
        ({"encoder_config": None}, ModelLoadError, "holds no encoder_config.*safe_serialization=True"),
        ({"encoder_config": {"model_type": "gpt2"}}, UnsupportedModelError, "model_type of encoder_config is 'gpt2'"),
        ({"encoder_config": ENCODER | {"num_hidden_layers": 10**18}}, ModelLoadError, "num_hidden_layers"),
    ],
)
def test_other_models_are_refused_by_name(
    tmp_path: Path, plain: tuple[LLM, GlinerFolder], changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    _, reference = plain
    for file in reference.path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    settings = json.loads((reference.path / "gliner_config.json").read_text())
    (tmp_path / "gliner_config.json").unlink()
    (tmp_path / "gliner_config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(kind, match=message):
        loaded(tmp_path)


def test_fewer_bits_are_for_the_encoder_alone(tmp_path: Path, plain: tuple[LLM, GlinerFolder]) -> None:
    llm, reference = plain
    for settings in ({"quantization": "int8"}, {"dtype": "bfloat16"}):
        other = LLM(str(reference.path), device="cpu", show_progress=False, **({"dtype": "float32"} | settings))
        head = other.engine.executor.runner.model.head
        assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
        found, wanted = (
            {(entity.start, entity.end, entity.label): entity.score for entity in output.entities}
            for output in (each.entities(CORPUS[1], LABELS, threshold=0, flat_ner=False)[0] for each in (other, llm))
        )
        common = found.keys() & wanted.keys()
        assert len(common) > 10
        differences = [abs(found[span] - wanted[span]) for span in common]
        assert 0 < sum(differences) / len(differences) < 0.1
        other.close()
    with pytest.raises(UnsupportedModelError, match=r"is a GLiNER.*Serve it with --quantization"):
        quantise_checkpoint(str(reference.path), tmp_path / "smaller", "int8")


def test_files_of_torch_are_not_read(tmp_path: Path) -> None:
    make_gliner(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"\(\*\.bin\) are not read.*safe_serialization=True"):
        loaded(tmp_path)


@pytest.mark.parametrize("asked", ASKED)
def test_the_library_finds_the_same(tmp_path: Path, asked: dict[str, Any]) -> None:
    """Where it is installed (CONTRIBUTING.md says how): in its own checkpoint, written by itself."""
    library = pytest.importorskip("gliner")
    start = make_gliner(tmp_path / "start")
    theirs = library.GLiNER.from_pretrained(str(start.path), local_files_only=True)
    theirs.save_pretrained(tmp_path / "saved", safe_serialization=True)
    llm = loaded(tmp_path / "saved")
    for text, output in zip(TEXTS, llm.entities(TEXTS, LABELS, **asked), strict=True):
        if "\u200b" not in text:  # see GlinerFolder.read
            same(output.entities, theirs.predict_entities(text, LABELS, **asked))
    llm.close()
