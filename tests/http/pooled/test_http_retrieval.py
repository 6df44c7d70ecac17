"""Retrieval over HTTP: sparse vectors and vectors of tokens, and the endpoints of text-embeddings-inference and Cohere,
each against this server's own."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.late_interaction import Late, pylate, stanford
from support.pooling_api import MODEL, PoolingApi
from support.text_encoders import LABELS, TEXTS, make_text_encoder
from test_retrieval import expanded


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> tuple[PoolingApi, Late]:
    """A model that does not say how queries and documents are read."""
    found = stanford(tmp_path_factory.mktemp("late"))
    return PoolingApi(found.encoder), found


def vectors(api: PoolingApi, **body: Any) -> list[Any]:
    return [item["embedding"] for item in api.ask("/v1/embeddings", **body)["data"]]


def listed(api: PoolingApi, path: str, **body: Any) -> list[Any]:
    """The answer of an endpoint that answers with a bare list."""
    found: Any = api.ask(path, **body)
    assert isinstance(found, list)
    return found


def refused(api: PoolingApi, path: str, **body: Any) -> str:
    """What text-embeddings-inference's clients read of an error."""
    answer = api.post(path, **body)
    assert answer.status_code == 400, answer.text
    assert api.client.asked == {}
    assert set(answer.json()) == {"error", "error_type"}
    assert answer.json()["error_type"] == "Validation"
    message: str = answer.json()["error"]
    return message


# ---------------------------------------------------------------- /pooling


def test_sparse_vectors(masked: PoolingApi) -> None:
    tokenizer = masked.checkpoint.tokenizer
    answer = masked.ask("/pooling", task="sparse_embed", input=TEXTS)
    for text, item in zip(TEXTS, answer["data"], strict=True):
        wanted = expanded(masked.checkpoint.model, tokenizer(text).input_ids)
        assert [entry["index"] for entry in item["data"]] == wanted.nonzero()[:, 0].tolist()
        for entry in item["data"]:
            assert entry["value"] == pytest.approx(float(wanted[entry["index"]]), rel=1e-4, abs=1e-5)
            assert entry["token"] == tokenizer.convert_ids_to_tokens(entry["index"])
    plain = [[{"index": e["index"], "value": e["value"]} for e in item["data"]] for item in answer["data"]]
    assert listed(masked, "/embed_sparse", inputs=TEXTS) == plain
    assert listed(masked, "/embed_sparse", inputs=TEXTS[0]) == plain[:1]


@torch.no_grad()
def test_weights_of_an_inputs_own_tokens(tmp_path: Path) -> None:
    """bge-m3's layer: the tokens that the tokenizer adds, and unknown ones, have no weight."""
    checkpoint = make_text_encoder("headless", tmp_path)
    layer = torch.nn.Linear(32, 1)
    torch.nn.init.constant_(layer.bias, 20.0)  # so that every token has a weight
    torch.save(layer.state_dict(), tmp_path / "sparse_linear.pt")
    text, tokenizer = "snow on the sea, \U0001f642 on the snow", checkpoint.tokenizer
    ids = tokenizer(text).input_ids
    assert tokenizer.unk_token_id in ids
    weights = layer(checkpoint.model(torch.tensor([ids])).last_hidden_state[0]).relu()[:, 0].tolist()
    wanted: dict[int, float] = {}
    for token, weight in zip(ids, weights, strict=True):
        if token not in tokenizer.all_special_ids:
            wanted[token] = max(wanted.get(token, 0.0), weight)
    (found,) = listed(PoolingApi(checkpoint), "/embed_sparse", inputs=text)
    assert {entry["index"]: entry["value"] for entry in found} == pytest.approx(wanted, rel=1e-4)


def test_vectors_of_tokens(late: tuple[PoolingApi, Late]) -> None:
    api, model = late
    answer = api.ask("/pooling", input=TEXTS)  # the model does nothing else
    for text, item in zip(TEXTS, answer["data"], strict=True):
        wanted = model.plain(model.encoder.tokenizer(text).input_ids)
        assert torch.allclose(torch.tensor(item["data"]), wanted, atol=1e-5)
    assert listed(api, "/embed_all", inputs=TEXTS) == [item["data"] for item in answer["data"]]
    data = api.ask("/pooling", input=TEXTS, encoding_format="base64")["data"]
    found = np.frombuffer(base64.b64decode(data[1]["data"]), dtype="<f4").reshape(-1, 12)
    assert np.array_equal(found, np.array(answer["data"][1]["data"], dtype=np.float32))


def test_ranks_by_max_sim(late: tuple[PoolingApi, Late]) -> None:
    api, model = late
    found = [model.plain(model.encoder.tokenizer(text).input_ids) for text in TEXTS]
    wanted = [float((found[0] @ other.T).max(1).values.sum()) for other in found]
    scores = [item["score"] for item in api.ask("/v1/score", text_1=TEXTS[0], text_2=TEXTS)["data"]]
    assert scores == pytest.approx(wanted, rel=1e-5)
    order = sorted(range(len(TEXTS)), key=lambda place: -scores[place])
    results = api.ask("/v1/rerank", query=TEXTS[0], documents=TEXTS)["results"]
    assert [(item["index"], item["relevance_score"]) for item in results] == [(at, scores[at]) for at in order]
    ours = [{"index": at, "score": scores[at]} for at in order]
    assert listed(api, "/rerank", query=TEXTS[0], texts=TEXTS) == ours
    assert api.refused("/v1/embeddings", input="a")["code"] == "unsupported_endpoint"
    assert "/v1/rerank" in api.send("GET", "/v1/models").json()["data"][0]["endpoints"]


def test_markers_go_by_the_side(tmp_path: Path) -> None:
    model = pylate(tmp_path / "m", {"do_query_expansion": False})
    api = PoolingApi(model.encoder)
    query = api.ask("/pooling", input=["snow"], prompt_name="query")["data"][0]["data"]
    document = api.ask("/pooling", input=["snow"], prompt_name="document")["data"][0]["data"]
    assert len(query) == len(document) == len(model.encoder.tokenizer("snow").input_ids) + 1
    wanted = (np.array(query) @ np.array(document).T).max(1).sum()
    assert api.ask("/v1/score", text_1="snow", text_2="snow")["data"][0]["score"] == pytest.approx(wanted, rel=1e-5)
    assert "no prompt named 'other'" in api.refused("/pooling", input=["snow"], prompt_name="other")["message"]
    assert api.refused("/pooling", input=[[7]], prompt_name="query")["param"] == "prompt_name"


def test_all_kinds_in_one_call(masked: PoolingApi) -> None:
    tasks = ["embed", "sparse_embed", "token_embed"]
    together = masked.ask("/pooling", task=tasks, input=TEXTS)
    apart = [masked.ask("/pooling", task=task, input=TEXTS) for task in tasks]
    assert together["usage"] == apart[0]["usage"]
    for place, item in enumerate(together["data"]):
        assert item["data"] == {task: answer["data"][place]["data"] for task, answer in zip(tasks, apart, strict=True)}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"task": ["embed", "embed"]}, "task"),
        ({"task": ["embed", "classify"]}, "task"),
        ({"task": []}, "task"),
        ({"task": ["embed", "token_embed"], "encoding_format": "bytes"}, "encoding_format"),
        ({"task": "sparse_embed", "encoding_format": "base64"}, "encoding_format"),
        ({"task": "token_embed", "dimensions": 4}, "dimensions"),
        ({"task": "sparse_embed", "normalize": True}, "normalize"),
        ({"task": "classify"}, "task"),
    ],
)
def test_what_does_not_go_together(body: dict[str, Any], param: str, masked: PoolingApi) -> None:
    assert masked.refused("/pooling", input="snow", **body)["param"] == param


def test_an_answer_has_a_limit(masked: PoolingApi) -> None:
    service = masked.app.state.service
    small = service.settings.model_copy(update={"max_answer_size": 1000})
    masked.app.state.service = replace(service, settings=small)
    try:
        answer = masked.post("/pooling", task="token_embed", input=TEXTS)
    finally:
        masked.app.state.service = service
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "answer_too_large"


# ---------------------------------------------------------------- text-embeddings-inference


def test_embed(headless: PoolingApi) -> None:
    assert listed(headless, "/embed", inputs=TEXTS) == vectors(headless, input=TEXTS)
    assert listed(headless, "/embed", inputs=[5, 6, 7]) == vectors(headless, input=[5, 6, 7])
    assert listed(headless, "/embed", inputs="snow", normalize=False) == vectors(
        headless, input="snow", normalize=False
    )
    assert listed(headless, "/embed", inputs="snow", dimensions=4) == vectors(headless, input="snow", dimensions=4)
    long = " ".join(TEXTS * 4)
    assert listed(headless, "/embed", inputs=long, truncate=True) == vectors(
        headless, input=long, truncate_prompt_tokens=-1
    )
    assert "is too long" in refused(headless, "/embed", inputs=long)
    assert "truncation_direction must be right" in refused(
        headless, "/embed", inputs=long, truncate=True, truncation_direction="Left"
    )
    assert headless.post("/embed", inputs="snow", other=1).headers["X-Octavo-Ignored-Fields"] == "other"


def test_similarity(headless: PoolingApi) -> None:
    wanted = [item["score"] for item in headless.ask("/v1/score", text_1=TEXTS[0], text_2=TEXTS)["data"]]
    assert listed(headless, "/similarity", inputs={"source_sentence": TEXTS[0], "sentences": TEXTS}) == wanted
    prompted = {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": {"prompt_name": "query"}}
    assert "prompt_name is not supported" in refused(headless, "/similarity", **prompted)


def test_predict(classes: PoolingApi) -> None:
    ours = classes.ask("/v1/classify", input=TEXTS)["data"]
    wanted = [[{"score": e["score"], "label": e["label"]} for e in item["scores"]] for item in ours]
    assert listed(classes, "/predict", inputs=TEXTS[0]) == wanted[0]
    assert listed(classes, "/predict", inputs=[TEXTS[0]]) == wanted[0]
    assert listed(classes, "/predict", inputs=[[text] for text in TEXTS]) == wanted
    (pair,) = classes.ask("/v1/classify", input=[{"text": "snow", "text_pair": "sea"}])["data"]
    assert listed(classes, "/predict", inputs=["snow", "sea"])[0]["score"] == pair["scores"][0]["score"]
    (raw,) = classes.ask("/v1/classify", input=["snow"], use_activation=False)["data"]
    assert listed(classes, "/predict", inputs="snow", raw_scores=True)[0]["score"] == raw["scores"][0]["score"]
    for wrong in ([], [["a", "b", "c"]], ["a", "b", "c"], [[]], "", [["a"], "b"], 3):
        assert "inputs" in refused(classes, "/predict", inputs=wrong)


def test_rerank_goes_by_its_fields(cross: PoolingApi) -> None:
    ours = cross.ask("/v1/rerank", query="snow", documents=TEXTS)["results"]
    wanted = [{"index": item["index"], "score": item["relevance_score"]} for item in ours]
    assert listed(cross, "/rerank", query="snow", texts=TEXTS) == wanted
    texts = [item | {"text": TEXTS[item["index"]]} for item in wanted]
    assert [dict(item) for item in listed(cross, "/rerank", query="snow", texts=TEXTS, return_text=True)] == texts
    (raw,) = cross.ask("/v1/score", text_1="snow", text_2="sea", use_activation=False)["data"]
    assert listed(cross, "/rerank", query="snow", texts=["sea"], raw_scores=True)[0]["score"] == raw["score"]
    assert cross.ask("/rerank", query="snow", documents=TEXTS)["results"] == ours
    assert cross.refused("/rerank", query="snow")["param"] == "documents"
    assert cross.refused("/rerank", query="snow", texts=["a"], documents=["a"])["param"] == "documents"


def test_info(headless: PoolingApi, classes: PoolingApi, cross: PoolingApi) -> None:
    found = headless.send("GET", "/info").json()
    assert (found["model_id"], found["max_input_length"]) == (MODEL, 48)
    assert found["model_type"] == {"embedding": {"pooling": "mean"}}
    labels = LABELS["classes"]
    assert classes.send("GET", "/info").json()["model_type"] == {
        "classifier": {
            "id2label": {str(place): label for place, label in enumerate(labels)},
            "label2id": {label: place for place, label in enumerate(labels)},
        }
    }
    assert set(cross.send("GET", "/info").json()["model_type"]) == {"reranker"}


def test_what_a_model_cannot_do(headless: PoolingApi, classes: PoolingApi) -> None:
    """The server's paths are in no refusal."""
    assert refused(headless, "/embed_sparse", inputs="a").startswith("this model cannot serve sparse_embed: ")
    assert "this model cannot serve classify" in refused(headless, "/predict", inputs="a")
    assert "cannot serve /v1/embeddings" in refused(classes, "/embed", inputs="a")
    assert "this model cannot serve token_embed" in refused(classes, "/embed_all", inputs="a")


def test_what_is_too_long(headless: PoolingApi, classes: PoolingApi, cross: PoolingApi) -> None:
    """The refusal names the list's item, and the field of that endpoint which would cut it."""
    long = " ".join(TEXTS * 4)
    sentences = {"source_sentence": "a", "sentences": ["b", long]}
    for api, path, body, item, advice in [
        (headless, "/embed", {"inputs": long}, "inputs[0]", "send truncate: true."),
        (headless, "/embed", {"inputs": ["a", long]}, "inputs[1]", "send truncate: true."),
        (headless, "/embed", {"inputs": [[5] * 99]}, "inputs[0]", "send truncate: true."),
        (headless, "/embed_all", {"inputs": [long]}, "inputs[0]", "send truncate: true."),
        (classes, "/predict", {"inputs": long}, "inputs[0]", "send truncate: true."),
        (headless, "/similarity", {"inputs": sentences}, "inputs.sentences[1]", "truncate: true among the parameters."),
        (cross, "/rerank", {"query": "a", "texts": [long]}, "the pair with texts[0]", "send truncate: true."),
        (cross, "/rerank", {"query": "a", "documents": [long]}, "the pair with documents[0]", "_prompt_tokens."),
        (headless, "/v2/embed", {"texts": [long], "truncate": "NONE"}, "texts[0]", "leave truncate out."),
        (headless, "/v1/embeddings", {"input": [long]}, "the input", "send truncate_prompt_tokens."),
    ]:
        answer = api.post(path, **body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        message = error["message"] if isinstance(error, dict) else error
        assert message.startswith(f"{item} is too long: "), message
        assert message.endswith(advice), message


# ---------------------------------------------------------------- Cohere


def test_cohere(headless: PoolingApi) -> None:
    kinds = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    answer = headless.ask("/v2/embed", model=MODEL, texts=TEXTS, input_type="search_query", embedding_types=kinds)
    wanted = np.array(vectors(headless, input=TEXTS), dtype=np.float32)
    found = answer["embeddings"]
    assert set(found) == set(kinds)
    assert np.array_equal(np.array(found["float"], dtype=np.float32), wanted)
    assert found["base64"] == [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in wanted]
    assert found["ubinary"] == np.packbits(wanted > 0, axis=1).tolist()
    assert np.array_equal(np.array(found["binary"]), np.array(found["ubinary"]) - 128)
    steps = np.array(found["int8"])
    assert np.abs(steps).max(1).tolist() == [127] * len(TEXTS)
    assert np.abs(steps / 127 * np.abs(wanted).max(1, keepdims=True) - wanted).max() < 1 / 127
    assert np.array_equal(np.array(found["uint8"]), steps + 128)
    assert (answer["texts"], answer["response_type"]) == (TEXTS, "embeddings_by_type")
    tokens = sum(map(headless.checkpoint.count, TEXTS))
    assert answer["meta"] == {"api_version": {"version": "2"}, "billed_units": {"input_tokens": tokens}}


def test_cohere_cuts(headless: PoolingApi) -> None:
    long = " ".join(TEXTS * 4)
    cut = headless.ask("/v2/embed", texts=[long])["embeddings"]["float"]
    assert cut == vectors(headless, input=long, truncate_prompt_tokens=-1)
    few = headless.ask("/v2/embed", texts=[long], max_tokens=5, output_dimension=8)["embeddings"]["float"]
    assert few == vectors(headless, input=long, truncate_prompt_tokens=5, dimensions=8)
    count = headless.checkpoint.count(TEXTS[0])
    (whole,) = headless.ask("/v2/embed", texts=TEXTS[:1], truncate="NONE", max_tokens=count)["embeddings"]["float"]
    assert whole == vectors(headless, input=TEXTS[0])[0]
    for body, param in [
        ({"texts": [long], "truncate": "NONE"}, "texts"),
        ({"texts": ["a", TEXTS[0]], "truncate": "NONE", "max_tokens": 3}, "texts"),
        ({"texts": [long], "truncate": "START"}, "truncate"),
        ({"texts": ["a"], "output_dimension": 64}, "output_dimension"),
        ({"texts": ["a"], "output_dimension": 4, "embedding_types": ["binary"]}, "output_dimension"),
        ({"texts": ["a"], "embedding_types": ["int4"]}, "embedding_types"),
        ({"texts": ["a"], "input_type": "other"}, "input_type"),
        ({"images": ["data:image/png;base64,AAAA"]}, "images"),
        ({"images": [""]}, "images"),
        ({"inputs": [{"content": []}]}, "inputs"),
        ({"texts": ["a"], "images": ["b"]}, "texts"),
        ({}, "texts"),
    ]:
        error = headless.refused("/v2/embed", **body)
        assert error["param"] == param, (body, error)
