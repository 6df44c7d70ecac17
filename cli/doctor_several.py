"""`octavo doctor` for several models: whether each can be loaded, and whether the memory is enough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cli.findings import Finding
from engine.process.predict import look
from server.models.declared import Declared

_MIB = 2**20


def check_several(models: Sequence[Declared], limit: int) -> Iterator[Finding]:
    """One finding per model, and one for all. `limit`: bytes that all may take together."""
    sizes: dict[str, int] = {}
    for model in models:
        found = look(model.engine)
        check = f"model {model.name}"
        if found.problem:
            yield Finding(check, "FAIL", found.problem, f"Correct its entry ({model.engine.model}).")
        elif found.unknown:
            text = f"{model.engine.model} is not on this machine and will be downloaded when it is first needed"
            yield Finding(check, "warn", text, "Download it now, so that no request waits for the download.")
        else:
            sizes[model.name] = found.memory
            yield Finding(check, "ok", f"{', '.join(found.tasks)}; needs {found.memory / _MIB:.0f} MiB")
    yield _memory(models, sizes, limit)


def _memory(models: Sequence[Declared], sizes: dict[str, int], limit: int) -> Finding:
    total = sum(sizes.values())
    pinned = sum(sizes.get(model.name, 0) for model in models if model.pinned)
    text = f"{limit / _MIB:.0f} MiB for all models, which need {total / _MIB:.0f} MiB together"
    too_large = [name for name, size in sizes.items() if size > limit]
    if too_large:
        fix = "Raise --max-memory, or lower their kv_cache_memory."
        return Finding("max memory", "FAIL", f"{text}; {', '.join(too_large)} cannot be loaded even alone", fix)
    if pinned > limit:
        return Finding("max memory", "FAIL", f"{text}; the pinned ones alone do not fit", "Pin fewer models.")
    if total > limit:
        text += ": the least recently used are unloaded for others"
    return Finding("max memory", "ok", text)
