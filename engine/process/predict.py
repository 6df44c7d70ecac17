"""A process that predicts the memory of models, as `octavo models` does: `python -m engine.process.predict`, with one
JSON line of settings per model on its standard input, a socket, and an empty line at the end. It answers each with a
line, and ends; it also ends, at once, when the other side closes the socket.

The server does not import torch, but this process does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import EngineConfig
from engine.errors import NotDownloadedError, OctavoError
from engine.host.children import end_with_parent, leave_signals_to_parent, start_child, take_standard_input

_TUPLES = ("lora_modules", "catalogue")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrediction:
    """The memory of a model before it is loaded. Sizes in bytes."""

    memory: int = 0  # the maximum that its engine takes, while it loads or once its KV cache is full
    weights: int = 0
    free: int = 0
    on_gpu: bool = False  # whether it is a GPU's memory
    tasks: tuple[str, ...] = ()  # what the model can do
    max_model_len: int = 0  # tokens of prompt and answer together
    path: str = ""  # the folder with its config.json
    dtype: str = ""
    quantization: str | None = None  # as in `EngineInfo`
    sees: bool = False  # whether it writes texts about images
    problem: str = ""  # why it cannot be loaded; "" if it can
    unknown: bool = False  # whether it is not on this machine yet


def predict(configs: Sequence[EngineConfig], *, download: bool = False) -> Iterator[MemoryPrediction]:
    """The predictions for some models, each as soon as it is known. Blocks for some seconds, most of them before the
    first one. `download`: whether models on the hub are downloaded first. Raises OctavoError if the process ended
    early."""
    asked = [json.dumps([download, dataclasses.asdict(config)]).encode() + b"\n" for config in configs]
    # A terminal's Ctrl-C is for the service to handle.
    line, process = start_child(f"{__package__}.predict", os.environ, stdout=subprocess.PIPE, start_new_session=True)
    with line:
        assert process.stdout is not None
        try:
            line.sendall(b"".join([*asked, b"\n"]))
            for _ in configs:
                answer = process.stdout.readline()
                if not answer:
                    raise OctavoError("the process that predicts the memory of models ended early.")
                yield _read(json.loads(answer))
        except ConnectionError as problem:
            raise OctavoError("the process that predicts the memory of models ended early.") from problem
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _read(values: dict[str, Any]) -> MemoryPrediction:
    return MemoryPrediction(**values | {"tasks": tuple(values["tasks"])})


def look(config: EngineConfig, *, download: bool = False) -> MemoryPrediction:
    """The prediction for one model, in this process, which imports torch. `download`: whether a model on the hub is
    downloaded first."""
    from engine.inspection import inspect_model  # imports torch
    from engine.model.checkpoint import locate

    try:
        if download:
            locate(config.model, config.revision, config.hf_token, mmproj=config.mmproj)
        facts = inspect_model(config)
    except NotDownloadedError:
        return MemoryPrediction(unknown=True)
    except OctavoError as problem:
        return MemoryPrediction(problem=str(problem))
    except Exception as problem:  # no check found the damage of a file; the other models are still predicted
        return MemoryPrediction(problem=f"{type(problem).__name__}: {problem}")
    on_gpu = facts.device.startswith("cuda")
    held = facts.planned
    if facts.resident:  # on a CPU
        held = max(facts.peak, facts.resident + facts.planned - facts.weights + facts.grammars)
    return MemoryPrediction(
        memory=held,
        weights=facts.weights,
        free=facts.free,
        on_gpu=on_gpu,
        tasks=("transcribe",) if facts.hears else tuple(facts.tasks),
        max_model_len=facts.max_model_len,
        path=str(facts.path),
        dtype=facts.dtype,
        quantization=facts.quantization,
        sees=facts.image_tokens > 0 or facts.writes_of_images,
    )


def main() -> None:
    """Answer each line."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is not an answer
    leave_signals_to_parent()
    line = take_standard_input()
    with line.makefile("rb") as file:
        asked = list(iter(file.readline, b"\n"))
    end_with_parent(line)
    for text in asked:
        download, values = json.loads(text)
        config = EngineConfig(**values | {name: tuple(values[name]) for name in _TUPLES})
        answers.write(json.dumps(dataclasses.asdict(look(config, download=download))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
