"""vLLM for CPUs in a process of its own: `LLM.generate` over all requests at once.

    python vllm_cpu_worker.py

Orders as in `octavo_worker.py`; settings are those of `vllm.LLM`.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import vllm
from protocol import serve

_loaded: dict[str, Any] = {}


def load(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint in place of the one before, unless that is the same: vLLM compiles, which takes a minute."""
    wanted = {"model": model, "enable_prefix_caching": False, "skip_tokenizer_init": True} | settings
    if _loaded.get("wanted") != wanted:
        _loaded.clear()
        gc.collect()  # an engine's processes end with it
        _loaded.update(llm=vllm.LLM(**wanted), wanted=wanted)
    config = _loaded["llm"].llm_engine.vllm_config.model_config
    return {"version": vllm.__version__, "quantization": config.quantization}


def generate(prompts: list[list[int]], new: list[int], beams: int = 1) -> dict[str, Any]:
    """Answers of exactly `new` tokens to all prompts at once."""
    if beams != 1:
        raise ValueError("vLLM's beam search has an interface of its own, which is not measured here")
    params = [
        vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False) for tokens in new
    ]
    started = time.perf_counter()
    outputs = _loaded["llm"].generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": [list(output.outputs[0].token_ids) for output in outputs]}


if __name__ == "__main__":
    serve({"load": load, "generate": generate})
