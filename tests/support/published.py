"""Published checkpoints: the contents of `published/NAME.json`, a config.json, is the constant NAME; and the parts that
are read from one. DeBERTa v3's config names no architecture; saving the model adds it.

`published_parts.json` holds what was read of these configs, and of changed ones. To record it anew:

    PYTHONPATH=tests:. python -m support.published
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoConfig

from engine.config import EngineConfig
from engine.configs.published import published
from engine.execution.loading import find_max_model_len
from engine.model import checkpoint, families
from engine.model.spec import ModelSpec, Stack

Read = Callable[..., ModelSpec]  # of the fixture `read`
FOLDER = Path(__file__).with_suffix("")


def __getattr__(name: str) -> dict[str, Any]:
    file = FOLDER / f"{name.lower()}.json"
    if not (name.isupper() and file.is_file()):
        raise AttributeError(f"no config.json of {name} is in {FOLDER}")
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return config


def decoder(model: ModelSpec) -> Stack:
    """The stack that writes."""
    assert model.decoder is not None
    return model.decoder


def read(folder: Path, values: dict[str, Any], **changes: Any) -> ModelSpec:
    """The parts of a config.json with these contents, as they are read from a checkpoint's folder."""
    (folder / "config.json").write_text(json.dumps(values | changes), encoding="utf-8")
    return families.build_spec(checkpoint.read_config(folder))


# ------------------------------------------------------------------ what the parts of published configs are

PARTS = FOLDER.with_name("published_parts.json")


def cases() -> list[dict[str, Any]]:
    """The recorded configs, each with its parts: a published one or what transformers makes of a model type, with what
    is changed in it."""
    found: list[dict[str, Any]] = json.loads(PARTS.read_text(encoding="utf-8"))
    return found


def parts_of_case(folder: Path, case: Mapping[str, Any]) -> list[str]:
    """The parts that this code reads from a case's config."""
    changes = case.get("changes", {})
    if "type" in case:
        return parts(families.describe(published(AutoConfig.for_model(case["type"], **changes))))
    left = {name: value for name, value in __getattr__(case["config"]).items() if name not in case.get("without", ())}
    model = read(folder, left, **changes)
    longest = find_max_model_len(EngineConfig(model="x"), checkpoint.read_config(folder), model)
    return [*parts(model), f"max_model_len={longest}"]


def parts(model: ModelSpec) -> list[str]:
    """A model's parts as lines: layers of the same parts in one, defaults left out."""
    lines: list[str] = []
    for name in ("encoder", "decoder"):
        stack: Stack | None = getattr(model, name)
        if stack is None:
            continue
        lines.append(f"{name}: {_said(replace(stack, blocks=()))}")
        layers: dict[str, list[int]] = {}
        for number, block in enumerate(stack.blocks):
            layers.setdefault(_said(block), []).append(number)
        lines += [f"{name} {_ranges(numbers)}: {block}" for block, numbers in layers.items()]
    whole = {name: getattr(model, name) for name in ("head", "context_length", "shared_tokens", "repeats", "filler")}
    derived = {name: getattr(model, name) for name in ("max_positions", "max_encoder_positions", "rotary_limits")}
    lines.append(", ".join(f"{name}={_said(value)}" for name, value in (whole | derived).items() if value is not None))
    if model.signal is not None:
        lines.append(f"signal: {_said(model.signal)}")
    if model.twin is not None:
        lines += [f"twin's {line}" for line in parts(model.twin)]
    return lines


def _said(part: Any) -> str:
    """A part without what it leaves at its default; numbers to seven digits, which every machine computes alike."""
    if isinstance(part, float):
        return f"{part:.7g}"
    if isinstance(part, tuple):
        return f"({', '.join(map(_said, part))})"
    if not is_dataclass(part):
        return repr(part)
    held = [(field.name, getattr(part, field.name)) for field in fields(part) if field.init]
    own = {field.name: field.default for field in fields(part)}
    return f"{type(part).__name__}({', '.join(f'{name}={_said(value)}' for name, value in held if value != own[name])})"


def _ranges(numbers: list[int]) -> str:
    """Layers by number: "0-2,5"."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _record() -> None:
    """Write the parts of all cases anew, after a change that is meant; the difference shows what it does."""
    made = []
    with TemporaryDirectory() as folder:
        for case in cases():
            asked = {name: value for name, value in case.items() if name != "parts"}
            read_now = ",\n ".join(json.dumps(line) for line in parts_of_case(Path(folder), case))
            made.append(f'{json.dumps(asked)[:-1]}, "parts": [\n {read_now}]}}')
    PARTS.write_text("[\n" + ",\n".join(made) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    _record()
