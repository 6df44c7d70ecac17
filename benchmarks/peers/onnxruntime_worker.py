"""ONNX Runtime in a process of its own, and the conversion of an encoder for it and for OpenVINO.

Orders as in `octavo_encoder_worker.py`; settings: "weights" ("float32" or "int8", which ONNX Runtime's dynamic
quantisation makes), "size", the inputs of a batch, and "threads". {"op": "convert", "model": folder, "head": ...}
writes `plain.onnx`, `float32.onnx` (fused by ONNX Runtime's optimiser for transformers, as optimum and fastembed
have it) and `int8.onnx` into the folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from encoder_batches import encode as batched
from encoder_batches import mean
from protocol import serve

_loaded: dict[str, Any] = {}


def convert(model: str, head: str) -> dict[str, Any]:
    """Write the three files."""
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers.optimizer import optimize_model
    from transformers import AutoModel, AutoModelForSequenceClassification

    class Plain(torch.nn.Module):
        """Two inputs and a result: the library's own signature has more."""

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(input_ids=ids, attention_mask=mask)[0]
            return result

    folder = Path(model)
    kind = AutoModelForSequenceClassification if head == "score" else AutoModel
    made = kind.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    ids, mask = torch.ones(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64)
    axes = {0: "rows", 1: "longest"}
    output = "logits" if head == "score" else "hidden"
    plain = Plain()
    plain.inner = made
    torch.onnx.export(
        plain, (ids, mask), str(folder / "plain.onnx"), input_names=["ids", "mask"], output_names=[output],
        dynamic_axes={"ids": axes, "mask": axes, output: axes if head == "mean" else {0: "rows"}}, dynamo=False,
    )  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    fused = optimize_model(
        str(folder / "plain.onnx"), "bert", config["num_attention_heads"], config["hidden_size"], opt_level=1
    )
    large = sum(tensor.numel() for tensor in made.parameters()) * 4 > 1 << 30  # protobuf holds 2 GiB
    fused.save_model_to_file(str(folder / "float32.onnx"), use_external_data_format=large)
    source = folder / "plain.onnx" if large else folder / "float32.onnx"
    quantize_dynamic(
        str(source), str(folder / "int8.onnx"), weight_type=QuantType.QInt8, per_channel=True,
        use_external_data_format=large, extra_options={"DefaultTensorType": 1},  # float32: of fused operators
    )  # fmt: skip
    return {"fused": {name: int(count) for name, count in fused.get_fused_operator_statistics().items()}}


def load(model: str, head: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Load one of the files."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = settings["threads"]
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    file = Path(model) / f"{settings['weights']}.onnx"
    _loaded["session"] = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    _loaded.update(head=head, size=settings["size"])
    return {"version": ort.__version__}


def _batch(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    made: np.ndarray = _loaded["session"].run(None, {"ids": ids, "mask": mask})[0]
    return made if _loaded["head"] == "score" else mean(made, mask)


def encode(inputs: list[list[int]]) -> dict[str, Any]:
    """All inputs, sorted by length."""
    return batched(inputs, _loaded["size"], _batch)


if __name__ == "__main__":
    serve({"convert": convert, "load": load, "encode": encode})
