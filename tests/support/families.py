"""All shapes of all families, and the search for prompts on which the reference decides clearly.

To add a shape, write it into its family's module under `family_shapes` without prompts, then run

    PYTHONPATH=tests:. python -m support.families NAME

and put the seeds that are printed (and the eos_gain, where another one is needed) into the shape.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from support import family_shapes
from support.family_shape import (
    BEAM_PROMPTS,
    SEARCHES,
    FamilyCheckpoint,
    FamilyShape,
    build_reference,
    make_family_checkpoint,
    prompt_of,
)
from support.reference import MIN_MARGIN, Reference

__all__ = ["FAMILY_SHAPES", "FamilyCheckpoint", "FamilyShape", "make_family_checkpoint"]

CLEAR = 3 * MIN_MARGIN  # what a decision found here must differ by: other machines round differently
GAINS = (1.4, 1.8, 2.2, 2.6, 3.2, 4.0)
PROMPTS = 4
SEEDS = range(60)
GIVE_UP = 12  # seeds that answer in one way only, or serve no beam search


def _collect() -> dict[str, FamilyShape]:
    found: dict[str, FamilyShape] = {}
    for module in pkgutil.iter_modules(family_shapes.__path__):
        shapes = importlib.import_module(f"{family_shapes.__name__}.{module.name}").SHAPES
        assert not found.keys() & shapes.keys(), f"{module.name}: a shape of that name is there already"
        found |= shapes
    return found


FAMILY_SHAPES = _collect()


def search(shape: FamilyShape) -> FamilyShape | None:
    """The shape with prompts that serve every test; with its own seed and EOS gain if those allow it, else
    with others."""
    gains = sorted(GAINS, key=lambda gain: (gain != shape.eos_gain, abs(gain - shape.eos_gain)))
    for seed, gain in itertools.product(range(shape.seed, shape.seed + 4), gains):
        tried = replace(shape, seed=seed, eos_gain=gain)
        model = FamilyCheckpoint(tried, Path(), build_reference(tried))
        if min(model.hidden(prompt)[1] for prompt in model.ragged()) < CLEAR:
            continue
        prompts = _clear_prompts(model)
        if prompts is not None:
            return replace(tried, prompts=prompts)
    return None


def stops(model: FamilyCheckpoint, answers: Reference) -> set[int]:
    """Lengths of the answers that EOS ended."""
    return {len(answer.tokens) for answer in answers.answers if answer.tokens[-1] in model.shape.eos}


def _clear_prompts(model: FamilyCheckpoint) -> tuple[int, ...] | None:
    """Seeds for the beam searches first, then for greedy decoding alone; None if too few are clear."""
    beams: list[int] = []
    stopping: list[int] = []
    running: list[int] = []
    for number, seed in enumerate(SEEDS):
        if number >= GIVE_UP and not (stopping and running and beams):
            return None
        prompt = prompt_of(model.shape, seed)
        greedy = model.greedy(prompt)
        if greedy.margin < CLEAR:
            continue
        (stopping if stops(model, greedy) else running).append(seed)
        if len(beams) < BEAM_PROMPTS and _serves_beams(model, prompt):
            beams.append(seed)
        # Greedy answers end in both ways, and one prompt is longer than a window.
        rest = [seed for seed in (*stopping[:1], *running, *stopping[1:]) if seed not in beams]
        chosen = (*beams, *rest[: PROMPTS - len(beams)])
        mixed = set(chosen) & set(stopping) and set(chosen) & set(running)
        longest = max(len(prompt_of(model.shape, seed)) for seed in chosen)
        if len(chosen) == PROMPTS and len(beams) == BEAM_PROMPTS and mixed and longest > model.window:
            return chosen
    return None


def _serves_beams(model: FamilyCheckpoint, prompt: list[int]) -> bool:
    """All searches are clear, and beams end at several lengths."""
    lengths: set[int] = set()
    for how in SEARCHES:
        found = model.beams(prompt, *how)
        if found.margin < CLEAR:
            return False
        lengths |= stops(model, found)
    return len(lengths) > 1


def print_found(shapes: Mapping[str, Any], search: Callable[[Any], Any], field: str) -> None:
    """Print what the shapes of the names on the command line need, or all shapes whose `field` is empty."""
    parser = argparse.ArgumentParser(description=print_found.__doc__)
    parser.add_argument("names", nargs="*", help="or the beginning of names")
    wanted = parser.parse_args().names
    torch.set_num_threads(1)  # tiny tensors gain nothing from threads
    for name, shape in shapes.items():
        if not name.startswith(tuple(wanted)) if wanted else getattr(shape, field):
            continue
        found = search(shape)
        if found is None:
            print(f"{name}: nothing clear; change the EOS ids, the vocabulary or the settings", flush=True)
            continue
        changed = [key for key in ("seed", "eos_gain", field) if getattr(found, key) != getattr(shape, key)]
        print(f"{name}: {', '.join(f'{key}={getattr(found, key)}' for key in changed)}", flush=True)


if __name__ == "__main__":
    print_found(FAMILY_SHAPES, search, "prompts")
