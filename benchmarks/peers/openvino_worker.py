"""OpenVINO GenAI in a process of its own, and the conversion of a checkpoint for it.

    python openvino_worker.py

Orders as in `octavo_worker.py`; settings: "pipeline" ("paged", which batches continuously, or "stateful"), "threads",
"properties" of the CPU plugin, "scheduler" (fields of `SchedulerConfig`). {"op": "convert", "model": folder, "folder":
where to, "weights": "bf16" or "int8"} exports with optimum-intel.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import serve

_loaded: dict[str, Any] = {}


def convert(model: str, folder: str, weights: str) -> dict[str, Any]:
    """A checkpoint of `transformers` as OpenVINO's IR with its tokenizer; int8 has a scale per output (nncf)."""
    import openvino_tokenizers
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig, OVWeightQuantizationConfig
    from transformers import AutoTokenizer

    config = OVConfig(dtype="bf16")
    if weights == "int8":
        config = OVConfig(quantization_config=OVWeightQuantizationConfig(bits=8, sym=False))
    main_export(model, folder, task="text-generation-with-past", ov_config=config, convert_tokenizer=False)
    tokenizers = openvino_tokenizers.convert_tokenizer(AutoTokenizer.from_pretrained(model), with_detokenizer=True)
    for name, part in zip(("openvino_tokenizer", "openvino_detokenizer"), tokenizers, strict=True):
        ov.save_model(part, f"{folder}/{name}.xml")
    return {"optimum-intel": version("optimum-intel"), "nncf": version("nncf")}


def load(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Load converted files, in place of the ones before."""
    _loaded.clear()
    properties = {"INFERENCE_NUM_THREADS": settings["threads"], **settings.get("properties", {})}
    if settings["pipeline"] == "stateful":
        _loaded["stateful"] = genai.LLMPipeline(model, "CPU", ATTENTION_BACKEND="SDPA", **properties)
    else:
        scheduler = genai.SchedulerConfig()
        for name, value in {"cache_size": 1, "enable_prefix_caching": False, **settings.get("scheduler", {})}.items():
            setattr(scheduler, name, value)
        _loaded["paged"] = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
    capabilities = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return {"version": version("openvino-genai"), "capabilities": capabilities}


def generate(prompts: list[list[int]], new: list[int], beams: int = 1) -> dict[str, Any]:
    """Answers of exactly `new` tokens to all prompts at once; the stateful pipeline takes them one by one."""
    configs, tensors = [], []
    for prompt, tokens in zip(prompts, new, strict=True):
        config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        if beams > 1:
            config = genai.GenerationConfig(
                max_new_tokens=tokens, min_new_tokens=tokens, ignore_eos=True, num_beams=beams, length_penalty=1.0
            )
        configs.append(config)
        tensors.append(ov.Tensor(np.array([prompt], dtype=np.int64)))
    started = time.perf_counter()
    if "paged" in _loaded:
        results = _loaded["paged"].generate(tensors, configs)
        answers = [result.m_generation_ids[0] for result in results]
    else:
        answers = [
            _loaded["stateful"].generate(tensor, config).tokens[0]
            for tensor, config in zip(tensors, configs, strict=True)
        ]
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": [[int(token) for token in answer] for answer in answers]}


if __name__ == "__main__":
    serve({"convert": convert, "load": load, "generate": generate})
