"""`transformers`' continuous batching on the same work: as many requests at once, prompts and answers as long."""

from __future__ import annotations

import gc
import logging
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from engine import Engine
from gpu_parts.decode import answer_all
from gpu_parts.shapes import Sizes, prompt

# Its settings are tried in turn, and the fastest counts. Without any it chooses for itself.
SETTINGS: dict[str, dict[str, Any]] = {
    "its own choice": {},
    "asynchronous, with CUDA graphs": {"use_async_batching": True, "use_cuda_graph": True},
}


def prompts(sizes: Sizes, vocab_size: int, number: int) -> list[list[int]]:
    """The requests of a round; no two rounds share a prefix."""
    first = 2_000_000 + 1000 * number
    return [prompt(first + row, sizes.peer_prompt, vocab_size) for row in range(sizes.peer_rows)]


def octavo(engine: Engine, sizes: Sizes) -> dict[str, float]:
    """Seconds of the work, and milliseconds of a step, after a round that does not count."""
    vocab = engine.info.vocab_size
    rounds = [
        answer_all(engine, prompts(sizes, vocab, number), sizes.peer_answer) for number in range(sizes.peer_rounds + 1)
    ][1:]
    seconds, steps = zip(*rounds, strict=True)
    return {"seconds": statistics.median(seconds), "step_ms": 1e3 * statistics.median(steps)}


def compare(config: Mapping[str, Any], device: torch.device, sizes: Sizes, ours: Mapping[str, float]) -> dict[str, Any]:
    """The peer's figures beside ours; where it cannot run, why ("skipped")."""
    result: dict[str, Any] = {
        "rows": sizes.peer_rows,
        "prompt": sizes.peer_prompt,
        "answer": sizes.peer_answer,
        "octavo": dict(ours),
        "transformers": {"version": transformers.__version__, "tried": {}},
    }
    theirs = result["transformers"]
    best: dict[str, Any] | None = None
    for name, settings in (SETTINGS if device.type == "cuda" else {"its own choice": {}}).items():
        try:
            figures = _measured(config, device, sizes, settings)
        except Exception as error:  # whatever it raises here, it is named, and the run goes on
            theirs["tried"][name] = f"{type(error).__name__}: {str(error).strip()[:300]}"
            continue
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        theirs["tried"][name] = figures
        if best is None or figures["seconds"] < best["seconds"]:
            best = figures | {"setting": name}
    if best is None:
        result["skipped"] = f"transformers' continuous batching did not run: {theirs['tried']}"
        print(f"  {result['skipped']}", flush=True)
        return result
    theirs.update(best)
    tokens = sizes.peer_rows * sizes.peer_answer
    result["ratio"] = best["seconds"] / ours["seconds"]
    result["step_ratio"] = best["step_ms"] / ours["step_ms"]
    print(
        f"  {sizes.peer_rows} prompts of {sizes.peer_prompt} tokens, answers of {sizes.peer_answer}: octavo "
        f"{tokens / ours['seconds']:.0f} tokens/s, {ours['step_ms']:.2f} ms a step; transformers {theirs['version']} "
        f"({best['setting']}, {best['attention']}) {tokens / best['seconds']:.0f} tokens/s, {best['step_ms']:.2f} ms "
        f"a step: {result['ratio']:.2f} times as fast",
        flush=True,
    )
    return result


def _measured(
    config: Mapping[str, Any], device: torch.device, sizes: Sizes, settings: Mapping[str, Any]
) -> dict[str, Any]:
    plain = {name: value for name, value in config.items() if name not in ("architectures", "dtype")}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**plain), dtype=getattr(torch, config["dtype"])
        ).eval()
    generation = GenerationConfig(max_new_tokens=sizes.peer_answer, do_sample=False, eos_token_id=-1, pad_token_id=0)
    limits = dict(settings)
    if device.type == "cpu":  # it would make pages of half the memory
        tokens = sizes.peer_rows * (sizes.peer_prompt + sizes.peer_answer)
        limits |= {"num_blocks": tokens // 8 + 64, "max_batch_tokens": tokens}
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # advice for those who write programs
    continuous = transformers.ContinuousBatchingConfig(**limits)
    seconds, steps = [], []
    try:
        for number in range(sizes.peer_rounds + 1):
            asked = prompts(sizes, config["vocab_size"], number)
            found = model.generate_batch(
                asked,
                generation_config=generation,
                continuous_batching_config=continuous,
                persistent_manager=True,
                record_timestamps=True,
            )
            answers = list(found.values())
            steps.append(_step(answers, sizes))
            # From the first request's turn to the last one's end: starting and ending its thread does not count.
            begun, ended = zip(*(answer.lifespan for answer in answers), strict=True)
            seconds.append(max(ended) - min(begun))
    finally:
        destroy = getattr(model, "destroy_cached_continuous_batching_manager", None)
        if destroy is not None:
            destroy()
    return {
        "seconds": statistics.median(seconds[1:]),
        "step_ms": 1e3 * statistics.median(steps[1:]),
        "attention": str(model.config._attn_implementation),
    }


def _step(answers: Sequence[Any], sizes: Sizes) -> float:
    """Seconds between two tokens of an answer, in the median.

    Raises:
        RuntimeError: an answer is missing, failed, or has another length.
    """
    if len(answers) != sizes.peer_rows:
        raise RuntimeError(f"{len(answers)} of {sizes.peer_rows} requests were answered")
    between: list[float] = []
    for answer in answers:
        if answer.error or len(answer.generated_tokens) != sizes.peer_answer:
            raise RuntimeError(f"an answer has {len(answer.generated_tokens)} tokens, error: {answer.error}")
        times = answer.timestamps or []
        between += [late - early for early, late in pairwise(times)]
    return statistics.median(between)
