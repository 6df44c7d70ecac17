"""OpenVINO on an encoder that `onnxruntime_worker.py` has converted, in a process of its own.

Orders as in `octavo_encoder_worker.py`; settings: "precision" ("f32" or "bf16"), "size", the inputs of a batch, and
"threads".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from encoder_batches import encode as batched
from encoder_batches import mean
from protocol import serve

_loaded: dict[str, Any] = {}


def load(model: str, head: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Compile the file."""
    properties = {"INFERENCE_PRECISION_HINT": settings["precision"], "INFERENCE_NUM_THREADS": settings["threads"]}
    properties |= {"PERFORMANCE_HINT": "LATENCY"}
    core = ov.Core()
    _loaded["request"] = core.compile_model(str(Path(model) / "plain.onnx"), "CPU", properties).create_infer_request()
    _loaded.update(head=head, size=settings["size"])
    return {"version": ov.__version__}


def _batch(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    (made,) = _loaded["request"].infer({"ids": ids, "mask": mask}).values()
    return made.copy() if _loaded["head"] == "score" else mean(made, mask)


def encode(inputs: list[list[int]]) -> dict[str, Any]:
    """All inputs, sorted by length."""
    return batched(inputs, _loaded["size"], _batch)


if __name__ == "__main__":
    serve({"load": load, "encode": encode})
