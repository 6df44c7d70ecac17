"""Each kind of tiny text model behind the HTTP API, made once for all tests, which leave it as it is."""

from __future__ import annotations

from typing import Any

import pytest
from support.pooling_api import PoolingApi
from support.text_encoders import make_text_encoder


def _served(kind: str) -> Any:
    @pytest.fixture(scope="session", name=kind)
    def serve(tmp_path_factory: pytest.TempPathFactory) -> PoolingApi:
        return PoolingApi(make_text_encoder(kind, tmp_path_factory.mktemp(kind)))

    return serve


answers, classes, cross, headless, masked, tokens = map(
    _served, ("answers", "classes", "cross", "headless", "masked", "tokens")
)
