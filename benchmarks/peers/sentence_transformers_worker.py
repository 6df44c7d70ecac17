"""sentence-transformers in a process of its own: its modules on batches of token ids, without its tokenizer.

Orders as in `octavo_encoder_worker.py`; settings: "dtype", and "size", the inputs of a batch.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from encoder_batches import encode as batched
from protocol import serve
from transformers import AutoModel, AutoModelForSequenceClassification

_loaded: dict[str, Any] = {}


def load(model: str, head: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint."""
    from sentence_transformers import models

    dtype = getattr(torch, settings["dtype"])
    if head == "score":  # what its CrossEncoder runs
        _loaded["model"] = AutoModelForSequenceClassification.from_pretrained(model, dtype=dtype).eval()
    else:
        inner = AutoModel.from_pretrained(model, dtype=dtype).eval()
        pooling = models.Pooling(inner.config.hidden_size, "mean")
        _loaded["model"] = lambda **given: pooling(
            {"token_embeddings": inner(**given).last_hidden_state, "attention_mask": given["attention_mask"]}
        )["sentence_embedding"]
    _loaded.update(head=head, size=settings["size"])
    return {"version": version("sentence-transformers"), "torch": torch.__version__}


@torch.inference_mode()
def _batch(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    made = _loaded["model"](input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
    vectors: np.ndarray = (made.logits if _loaded["head"] == "score" else made).float().numpy()
    return vectors


def encode(inputs: list[list[int]]) -> dict[str, Any]:
    """All inputs, sorted by length as its `encode` sorts them."""
    return batched(inputs, _loaded["size"], _batch)


if __name__ == "__main__":
    serve({"load": load, "encode": encode})
