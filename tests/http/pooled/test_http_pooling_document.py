"""What /docs says of the endpoints that score, classify and fill masks is what they do."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from support.documented import validate
from support.entities import make_gliner
from support.pooling_api import PoolingApi
from support.text_encoders import make_text_encoder

SERVED = {
    "cross": ["/v1/score", "/v1/rerank", "/v1/classify"],
    "classes": ["/v1/classify"],
    "tokens": ["/v1/classify"],
    "headless": ["/v1/score", "/v1/rerank"],
    "masked": ["/v1/fill-mask"],
    "answers": ["/v1/answer"],
    "entities": ["/v1/entities"],
}


# The same for all models (test_http_endpoints.py), and it takes a second to make.
DOCUMENT: dict[str, Any] = {}


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PoolingApi]:
    """A model, and its kind."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "entities":
        api = PoolingApi(make_gliner(folder))
    else:
        api = PoolingApi(make_text_encoder(request.param, folder, max_position_embeddings=512))
    if not DOCUMENT:
        DOCUMENT.update(api.app.openapi())
    api.app.openapi_schema = DOCUMENT
    return request.param, api


def test_examples_work_as_they_stand(served: tuple[str, PoolingApi]) -> None:
    kind, api = served
    document = api.app.openapi()
    for path in SERVED[kind]:
        examples = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["examples"]
        assert len(examples) > 1
        for name, example in examples.items():
            answer = api.post(path, **example["value"])
            pair = kind == "tokens" and name == "pair"
            assert answer.status_code == (400 if pair else 200), (path, name, answer.text)
            assert "x-octavo-ignored-fields" not in answer.headers
    for schema in (
        "ScoreRequest",
        "RerankRequest",
        "ClassifyRequest",
        "AnswerRequest",
        "EntitiesRequest",
        "FillMaskRequest",
    ):
        fields = document["components"]["schemas"][schema]["properties"]
        assert all(field.get("description") for field in fields.values()), schema


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_the_app_keeps_to_its_document(served: tuple[str, PoolingApi], mode: GenerationMode) -> None:
    kind, api = served
    statuses: Counter[tuple[str, int]] = Counter()
    schema = schemathesis.openapi.from_asgi("/openapi.json", api.app)
    for path in SERVED[kind]:
        operation = schema[path]["POST"]

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=15, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
        )
        def holds(case: Any) -> None:
            answer = case.call()
            if validate(case, answer):
                statuses[case.operation.path, answer.status_code] += 1
                assert answer.status_code in (200, 400, 404)

        holds()
        masks = mode is GenerationMode.POSITIVE and path == "/v1/fill-mask"  # no mask is drawn by chance
        wanted = 400 if masks or mode is GenerationMode.NEGATIVE else 200
        assert statuses[path, wanted], statuses
