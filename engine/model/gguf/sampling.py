"""A GGUF file's sampling defaults in the form of `generation_config.json`: its own, and llama.cpp's for the rest."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.interface.generation import FALLBACK
from engine.model.gguf.container import Gguf

_LLAMA_CPP = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's sampling defaults, for parameters that neither the file nor the request sets."""
_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "penalty_repeat": "repetition_penalty",
    # Not implemented: a warning names them.
    "mirostat": "mirostat",
    "sequence": "sampling_sequence",
}
_PREFIX = "general.sampling."


def sampling_fields(file: Gguf) -> dict[str, Any]:
    """The fields that the file's metadata sets, and under `FALLBACK` llama.cpp's values of the others."""
    found = {
        field: _plain(file.metadata[_PREFIX + key]) for key, field in _KEYS.items() if _PREFIX + key in file.metadata
    }
    last_n = file.metadata.get(f"{_PREFIX}penalty_last_n")
    if last_n == 0:  # no token is penalised
        found.pop("repetition_penalty", None)
    elif "repetition_penalty" in found:
        found["penalty_last_n"] = last_n
    return found | {FALLBACK: {name: value for name, value in _LLAMA_CPP.items() if name not in found}}


def _plain(value: Any) -> Any:
    """A float32 with few digits: 0.6, not 0.6000000238418579."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
