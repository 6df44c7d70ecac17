"""CTranslate2 in a process of its own: its threads and torch's are not to meet.

    python ctranslate2_worker.py

Orders as in `octavo_worker.py`; settings: "translator" (keywords of `Translator`) and "options" (of `translate_batch`).
{"op": "convert", "model": folder, "folder": where to} converts a checkpoint, in float32.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import ctranslate2
from protocol import serve

_loaded: dict[str, Any] = {}


def convert(model: str, folder: str, weights: str = "float32") -> dict[str, Any]:
    """A checkpoint of `transformers` in CTranslate2's format; other weights are made when it is loaded."""
    ctranslate2.converters.TransformersConverter(model).convert(folder)
    return {"weights": weights}


def load(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Load converted files, in place of the ones before, whose threads end first."""
    _loaded.clear()
    _loaded["translator"] = ctranslate2.Translator(model, device="cpu", **settings["translator"])
    _loaded["options"] = settings.get("options", {})
    tokens = json.loads((Path(model) / "shared_vocabulary.json").read_text())
    _loaded["tokens"], _loaded["ids"] = tokens, {token: index for index, token in enumerate(tokens)}
    return {
        "version": ctranslate2.__version__,
        "compute_types": sorted(ctranslate2.get_supported_compute_types("cpu")),
    }


def generate(prompts: list[list[int]], new: list[int], beams: int = 1) -> dict[str, Any]:
    """Answers to all inputs, one length for all of them."""
    if len(set(new)) != 1:
        raise ValueError(f"translate_batch has one length for all answers, and {new} were asked for")
    inputs = [[_loaded["tokens"][token] for token in prompt] for prompt in prompts]
    started = time.perf_counter()
    results = _loaded["translator"].translate_batch(
        inputs,
        beam_size=beams,
        length_penalty=1.0,
        min_decoding_length=new[0],
        max_decoding_length=new[0],
        **_loaded["options"],
    )
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": [[_loaded["ids"][word] for word in one.hypotheses[0]] for one in results]}


if __name__ == "__main__":
    serve({"convert": convert, "load": load, "generate": generate})
