"""The predicted memory of an engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.image_writers import make_writer

from engine import EngineConfig, inspect_model
from engine.process.predict import look
from server.config.settings import DEMOS


def test_all_memory_that_an_engine_may_take_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several models, the service reserves what is predicted here."""
    config = EngineConfig(model=str(DEMOS["chat"]), device="cpu", kv_cache_memory="512MiB")
    facts = inspect_model(config)
    vocabulary = 1536
    assert facts.grammars == 1000 * vocabulary
    assert facts.early_grammars
    assert facts.planned == facts.weights + facts.pages
    assert look(config).memory == facts.resident + facts.pages + facts.grammars > facts.peak
    more = replace(facts, states=3 << 30, images=5 << 30, grammars=7 << 30)
    monkeypatch.setattr("engine.inspection.inspect_model", lambda config: more)
    assert look(config).memory == facts.resident + facts.pages + (15 << 30)
    monkeypatch.setattr("engine.inspection.inspect_model", lambda config: replace(more, resident=0, device="cuda:0"))
    assert look(config).memory == facts.weights + facts.pages + (8 << 30), "grammars are not in a GPU's memory"


def test_a_model_that_writes_nothing_prepares_no_grammars() -> None:
    facts = inspect_model(EngineConfig(model=str(DEMOS["chat"]), device="cpu", skip_tokenizer_init=True))
    assert (facts.grammars, facts.early_grammars) == (0, False)


def test_a_model_that_writes_of_images_sees(tmp_path: Path) -> None:
    """Ollama's clients send images only to models that say so, also before the first load."""
    make_writer("trocr", tmp_path)
    assert look(EngineConfig(model=str(tmp_path), device="cpu")).sees
    assert not look(EngineConfig(model=str(DEMOS["chat"]), device="cpu")).sees
