"""Octavo in a process of its own, as its peers are: `LLM.generate`, and what a step consists of.

    python octavo_worker.py

Orders: {"op": "load", "model": folder, "settings": of `EngineConfig`}, {"op": "generate", "prompts": token ids,
"new": tokens of each answer, "beams": number}, {"op": "hold", "prompt": ids} and then {"op": "advance", "new": tokens},
{"op": "overhead", ...}, {"op": "first_token", "prompt": ids}.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protocol import serve

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from engine import LLM, SamplingParams  # noqa: E402

_loaded: list[LLM] = []


def load(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint, in place of the one before."""
    unload()
    llm = LLM(
        model, device="cpu", skip_tokenizer_init=True, enable_prefix_caching=False, show_progress=False, **settings
    )
    _loaded.append(llm)
    return {"dtype": llm.engine.info.dtype}


def unload() -> dict[str, Any]:
    """Free what is loaded, and close its files."""
    while _loaded:
        _loaded.pop().close()
    gc.collect()
    return {}


def generate(prompts: list[list[int]], new: list[int], beams: int = 1) -> dict[str, Any]:
    """Answers of exactly `new` tokens to all prompts at once."""
    # min_tokens bans the end token, which a search would else choose; greedy answers run past it.
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            num_beams=beams,
            length_penalty=1.0,
            ignore_eos=beams == 1,
            min_tokens=0 if beams == 1 else tokens,
        )
        for tokens in new
    ]
    started = time.perf_counter()
    outputs = _loaded[0].generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": [list(output.outputs[0].token_ids) for output in outputs]}


def hold(prompt: list[int]) -> dict[str, Any]:
    """Compute a prompt, in place of the one before. Its answer begins, and goes on with `advance`."""
    engine = _loaded[0].engine
    engine.abort_request("held")
    room = engine.info.max_model_len - len(prompt)
    engine.add_request("held", prompt, SamplingParams(temperature=0.0, max_tokens=room, num_beams=1, ignore_eos=True))
    while not _step(engine):
        pass
    return {}


def advance(new: int) -> dict[str, Any]:
    """Seconds of that many more tokens of the answer."""
    engine, tokens = _loaded[0].engine, []
    started = time.perf_counter()
    while len(tokens) < new:
        tokens += _step(engine)
    return {"seconds": time.perf_counter() - started, "tokens": tokens}


def _step(engine: Any) -> list[int]:
    return [token for delta in engine.step_deltas() for choice in delta.choices for token in choice.token_ids]


def first_token(prompt: list[int]) -> dict[str, Any]:
    """Seconds from a request's arrival at the engine to its first token."""
    engine, first = _loaded[0].engine, None
    started = time.perf_counter()
    engine.add_request("first", prompt, SamplingParams(temperature=0.0, max_tokens=2, num_beams=1, ignore_eos=True))
    while engine.has_unfinished_requests():
        brought = any(choice.token_ids for delta in engine.step_deltas() for choice in delta.choices)
        if brought and first is None:
            first = time.perf_counter() - started
    return {"seconds": first}


def overhead(prompts: list[list[int]], new: int) -> dict[str, Any]:
    """Seconds of the steps in which all requests decode, and what of them each part took.

    The parts are wrapped from the outside: `schedule` (which also makes the plan), `update`, and the model with its
    logits. What is left of the runner's time is preparing tensors and sampling.
    """
    engine = _loaded[0].engine
    runner: Any = engine.runner
    spent: dict[str, float] = defaultdict(float)
    parts = [
        (engine.scheduler, "schedule", "schedule"),
        (engine.scheduler, "update", "update"),
        (runner, "launch", "execute"),
        (runner.model, "forward", "model"),
        (runner.model, "logits", "model"),
    ]
    for owner, method, part in parts:
        setattr(owner, method, _timed(getattr(owner, method), part, spent))
    params = SamplingParams(temperature=0.0, max_tokens=new, num_beams=1, ignore_eos=True)
    steps: list[dict[str, float]] = []
    try:
        for number, prompt in enumerate(prompts):
            engine.add_request(f"overhead-{number}", prompt, params)
        while engine.has_unfinished_requests():
            spent.clear()
            started = time.perf_counter()
            deltas = engine.step_deltas()
            seconds = time.perf_counter() - started
            tokens = sum(len(choice.token_ids) for delta in deltas for choice in delta.choices)
            if tokens == len(prompts) and not any(delta.finished for delta in deltas):
                steps.append(dict(spent) | {"step": seconds})
    finally:
        for owner, method, _ in parts:
            delattr(owner, method)  # the class has its own
    if not steps or any(step.get("model", 0.0) == 0.0 for step in steps):
        raise RuntimeError("a step ran that did not go through the model's forward and logits, so no part is known")
    return {"steps": steps}


def _timed(method: Callable[..., Any], part: str, spent: dict[str, float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            spent[part] += time.perf_counter() - started

    return call


if __name__ == "__main__":
    serve(
        {
            "load": load,
            "unload": unload,
            "generate": generate,
            "hold": hold,
            "advance": advance,
            "first_token": first_token,
            "overhead": overhead,
        }
    )
