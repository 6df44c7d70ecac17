"""Random configurations of every family, compared with `transformers`.

A configuration is drawn from two shapes of one architecture (`family_shapes`, `encoder_shapes`): each setting comes
from either, then sizes, switches, activations, windows, experts and scalings are drawn anew. So a family takes part as
soon as it has shapes. What transformers cannot compute itself is drawn again. What we compute must be equal; what we
refuse must name a reason.

    PYTHONPATH=tests:. python -m support.fuzz --count 500

prints every configuration that differs or is refused; `--only NAME --first N --count 1` repeats one.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.backends.attention.base import AttentionMetadata
from engine.backends.attention.selection import select
from engine.errors import UnsupportedModelError
from engine.model import checkpoint, families
from support.checkpoints import random_prompt
from support.encoders import ENCODER_SHAPES, EncoderShape, make_encoder_checkpoint
from support.families import FAMILY_SHAPES, FamilyShape, make_family_checkpoint
from support.family_shape import run, watching_routers
from support.pages import Pages, close, load, scattered_tables
from support.reference import MIN_MARGIN

Shape = FamilyShape | EncoderShape

LENGTHS = (37, 1, 14)
REDRAWN = 30  # how often a configuration is drawn that transformers does not compute

HEADS = ("num_attention_heads", "n_head", "num_heads", "attention_heads", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
WIDTHS = ("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner", "dff", "hidden_dim")
WINDOWS = ("sliding_window", "window_size", "local_attention")
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ACTIVE = ("num_experts_per_tok", "moe_k", "moe_topk")
ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation", "activation")
FUNCTIONS = ("gelu", "gelu_new", "relu", "silu", "tanh", "quick_gelu", "gelu_pytorch_tanh")
SWITCHES = ("bias", "tie_word_embeddings", "scale_embedding", "use_parallel_residual", "qk_norm", "norm_topk")


def shapes_of() -> dict[str, list[Shape]]:
    """The shapes of each architecture that transformers has, checkpoints in older forms left out."""
    found: dict[str, list[Shape]] = {}
    for shape in (*FAMILY_SHAPES.values(), *ENCODER_SHAPES.values()):
        name = shape.architecture
        if shape.finish is None and name in families.supported() and hasattr(transformers, name):
            found.setdefault(name, []).append(shape)
    return found


def draw(shapes: list[Shape], rng: random.Random) -> Shape:
    """A shape between two of one architecture, and beyond."""
    one, other = rng.choice(shapes), rng.choice(shapes)
    settings = _mixed(one.settings, other.settings, rng)
    kind = getattr(transformers, one.architecture).config_class
    known = dict(vars(kind(**dict(one.settings)))) | settings
    _resize(settings, known, rng)
    for name, value in known.items():
        if isinstance(value, bool) and any(part in name for part in SWITCHES) and rng.random() < 0.25:
            settings[name] = not value
        if name.endswith(("_eps", "_epsilon")) and isinstance(value, float) and rng.random() < 0.5:
            settings[name] = 10 ** rng.uniform(-6, -2)
        if name in WINDOWS and isinstance(value, int) and value > 1 and rng.random() < 0.5:
            settings[name] = rng.randint(2, 40)
        if name in ACTIVATIONS and isinstance(value, str) and rng.random() < 0.3:
            settings[name] = rng.choice(FUNCTIONS)
    rope = known.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope and rng.random() < 0.6:
        settings["rope_parameters"] = rope | _scaling(rng) if rope.get("rope_type") == "default" else rope
        settings["rope_parameters"] |= {"rope_theta": round(10 ** rng.uniform(2, 6))}
    return replace(one, settings=settings, seed=rng.randrange(1000), vocab=rng.randint(100, 250))


def _mixed(one: Mapping[str, Any], other: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Each setting of either; those that must fit each other, sizes of heads and lists by layer, together of the first.

    A setting that only one of them has is set or left to its default.
    """
    mixed = dict(one)
    for name in sorted(one.keys() | other.keys()):
        value = other.get(name)
        listed = isinstance(value, list | tuple | dict) or isinstance(one.get(name), list | tuple | dict)
        tied = (
            name in HEADS + KV_HEADS + HIDDEN + LAYERS
            or "head" in name
            or "dim" in name
            or "layer" in name
            or "position" in name
        )
        if tied or listed or rng.random() < 0.5:
            continue
        if name in other:
            mixed[name] = value
        else:
            del mixed[name]
    return mixed


def _resize(settings: dict[str, Any], known: Mapping[str, Any], rng: random.Random) -> None:
    """Other numbers of heads, of the same size; other widths, numbers of experts, and layers where no list counts
    them."""
    heads, kv, hidden = (_first(names, settings) for names in (HEADS, KV_HEADS, HIDDEN))
    if heads and hidden and isinstance(known.get(hidden), int) and rng.random() < 0.7:
        size = known[hidden] // known[heads]
        shared = rng.randint(1, 3)
        own = rng.randint(1, 3) if kv else 1
        settings[heads], settings[hidden] = shared * own, shared * own * size
        if kv:
            settings[kv] = shared
    for name in WIDTHS:
        if isinstance(settings.get(name), int) and rng.random() < 0.7:
            settings[name] = rng.randint(5, 80)
    count, active = _first(COUNTS, settings), _first(ACTIVE, settings)
    if count and active and isinstance(settings[active], int) and rng.random() < 0.5:
        settings[count] = rng.randint(2, 9)
        settings[active] = rng.randint(1, settings[count])
    layers = _first(LAYERS, settings)
    by_layer = any(isinstance(value, list | tuple) for value in settings.values())
    if layers and not by_layer and rng.random() < 0.4:
        settings[layers] = rng.randint(1, 4)


def _first(names: tuple[str, ...], settings: Mapping[str, Any]) -> str | None:
    return next((name for name in names if name in settings), None)


def _scaling(rng: random.Random) -> dict[str, Any]:
    factor = rng.uniform(1.5, 16)
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"rope_type": "linear", "factor": factor},
        {"rope_type": "dynamic", "factor": factor},
        {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": rng.uniform(1.5, 8),
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 64},
    )
    return dict(rng.choice(kinds))


# ---------------------------------------------------------------- comparing


def compare(architecture: str, number: int, folder: Path) -> str:
    """Draw configuration `number` of an architecture and compare it: "equal", "refused: " with the reason, or "unclear"
    (experts that are chosen by less than rounding).

    Raises:
        AssertionError: hidden states or logits differ; the configuration is in a note.
    """
    rng = random.Random(f"{architecture} {number}")
    shapes = shapes_of()[architecture]
    for _ in range(REDRAWN):
        shape = draw(shapes, rng)
        try:
            made: Any = (
                make_encoder_checkpoint(shape, folder)
                if isinstance(shape, EncoderShape)
                else make_family_checkpoint(shape, folder)
            )
            found = _reference(made.model, shape)
        except Exception:
            continue
        if not all(bool(torch.isfinite(tensor).all()) for pair in found[:2] for tensor in pair):
            continue
        try:
            return _compare(shape, folder, found)
        except Exception as error:
            error.add_note(f"{architecture} {number}: {shape}")
            raise
    raise AssertionError(f"{architecture} {number}: transformers computes none of {REDRAWN} configurations")


def _lengths(shape: Shape) -> list[int]:
    """Of a shape whose rotary factors depend on the length those at which the reference has the same ones."""
    return list(shape.lengths if isinstance(shape, FamilyShape) else LENGTHS)


def _prompts(shape: Shape) -> list[list[int]]:
    return [random_prompt(shape.vocab, 1000 + length, length) for length in _lengths(shape)]


def _reference(model: Any, shape: Shape) -> tuple[list[torch.Tensor], list[torch.Tensor], float]:
    """Hidden states and, of decoders, logits of each prompt; the smallest margin of a choice of experts."""
    hidden, logits = [], []
    with watching_routers(model) as margins:
        for prompt in _prompts(shape):
            ids = torch.tensor([prompt])
            if isinstance(shape, EncoderShape):
                masks = {"attention_mask": torch.ones_like(ids)}
                if shape.global_tokens is not None:
                    masks["global_attention_mask"] = torch.tensor([list(shape.global_tokens(prompt))])
                with torch.no_grad():
                    hidden.append(model.base_model(ids, **masks).last_hidden_state[0])
            else:
                trunk = model.base_model
                trunk = trunk.model if trunk is model else trunk  # Llama 4 is its own base
                hidden.append(run(trunk, prompt).last_hidden_state[0])
                logits.append(run(model, prompt).logits[0])
    return hidden, logits, min(margins, default=math.inf)


def _compare(shape: Shape, folder: Path, found: tuple[list[torch.Tensor], list[torch.Tensor], float]) -> str:
    hidden, logits, margin = found
    if margin < MIN_MARGIN:
        return "unclear"
    prompts = _prompts(shape)
    try:
        spec = families.build_spec(checkpoint.read_config(folder))
    except UnsupportedModelError as error:
        return f"refused: {error}"
    parts = [block.attention for stack in (spec.encoder, spec.decoder) if stack is not None for block in stack.blocks]
    lengths = _lengths(shape)
    most = shape.max_model_len if isinstance(shape, FamilyShape) else max(lengths)
    model = load(folder, max_model_len=most, backend=select("cpu", parts))
    if model.decoder is None:
        ids = [token for prompt in prompts for token in prompt]
        positions = torch.tensor([place for prompt in prompts for place in range(len(prompt))])
        metadata = AttentionMetadata.build(lengths, lengths, torch.device("cpu"))
        with torch.inference_mode():
            ours = model.read(torch.tensor(ids), positions, metadata, tokens=len(ids))
        for mine, theirs in zip(ours.split(lengths), hidden, strict=True):
            close(mine, theirs)
        return "equal"
    tables = scattered_tables(lengths)
    whole = Pages(model, tables, reach=lengths).step(prompts)
    pages = Pages(model, tables, reach=lengths)
    pieces: list[list[torch.Tensor]] = [[] for _ in prompts]
    for chunk in (5, 1, 11, max(lengths)):
        steps = [prompt[pages.lengths[row] :][: chunk + row] for row, prompt in enumerate(prompts)]
        for row, states in enumerate(pages.step(steps)):
            pieces[row].append(states)
    for mine, parts_of_it, theirs, scores in zip(whole, pieces, hidden, logits, strict=True):
        close(mine, theirs)
        close(torch.cat(parts_of_it), theirs)
        with torch.inference_mode():
            close(model.logits(mine), scores)
    return "equal"


def main() -> int:
    """Compare so many configurations, over all architectures in turn; 1 if one differs."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first configuration of each architecture")
    parser.add_argument("--only", default="", help="the beginning of architectures' names")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    names = [name for name in shapes_of() if name.startswith(given.only)]
    seen: Counter[str] = Counter()
    for number in range(given.count):
        name, turn = names[number % len(names)], given.first + number // len(names)
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = compare(name, turn, Path(folder))
                if outcome.startswith("refused"):
                    print(f"{name} {turn} {outcome}", flush=True)
            except Exception as error:
                outcome = "different"
                print(f"{name} {turn}: {type(error).__name__}: {error}", *getattr(error, "__notes__", ()), flush=True)
        seen[outcome.partition(":")[0]] += 1
    print(f"{sum(seen.values())} configurations of {len(names)} architectures: {dict(seen)}")
    return 1 if seen["different"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
