"""Octavo's engine on an encoder, in a process of its own.

Orders: {"op": "load", "model": folder, "head": "mean" or "score", "settings": of `EngineConfig`}, {"op": "encode",
"inputs": token ids}.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from protocol import serve

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from encoder_batches import answer

from engine import Engine, EngineConfig, PoolingParams

_loaded: dict[str, Any] = {}
_HEADS = {
    "mean": PoolingParams(pooling="mean", normalize=False),
    "score": PoolingParams(task="classify", use_activation=False),
}


def load(model: str, head: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint."""
    config = EngineConfig(model=model, device="cpu", skip_tokenizer_init=True, show_progress=False, **settings)
    _loaded.update(engine=Engine(config), params=_HEADS[head])
    return {"dtype": _loaded["engine"].info.dtype}


def encode(inputs: list[list[int]]) -> dict[str, Any]:
    """All inputs at once, in the order in which they come."""
    engine, found = _loaded["engine"], {}
    started = time.perf_counter()
    for number, tokens in enumerate(inputs):
        engine.add_request(str(number), tokens, _loaded["params"])
    while engine.has_unfinished_requests():
        for delta in engine.step_deltas():
            found[int(delta.request_id)] = delta.pooled.values()[0]
    return answer(time.perf_counter() - started, [found[number].reshape(-1) for number in range(len(inputs))])


if __name__ == "__main__":
    serve({"load": load, "encode": encode})
