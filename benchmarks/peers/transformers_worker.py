"""`transformers` in a process of its own: `generate` over one left-padded batch of all requests.

Orders as in `octavo_worker.py`; settings: dtype, and generate's own.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from protocol import serve

_loaded: dict[str, Any] = {}


def load(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint, in place of the one before."""
    dtype = getattr(torch, settings.pop("dtype"))
    _loaded["model"] = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    _loaded["options"] = settings
    return {"version": transformers.__version__, "torch": torch.__version__}


def generate(prompts: list[list[int]], new: list[int], beams: int = 1) -> dict[str, Any]:
    """Answers to all prompts; the batch runs until its longest answer is done, and the others are cut."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    started = time.perf_counter()
    with torch.inference_mode():
        output = _loaded["model"].generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            num_beams=beams,
            length_penalty=1.0,
            min_new_tokens=max(new),
            max_new_tokens=max(new),
            pad_token_id=0,
            **_loaded["options"],
        )
    seconds = time.perf_counter() - started
    answers = output[:, longest:].tolist()
    return {"seconds": seconds, "tokens": [answer[:count] for answer, count in zip(answers, new, strict=True)]}


if __name__ == "__main__":
    serve({"load": load, "generate": generate})
