"""Random configurations of every family, compared with `transformers`.

A configuration is drawn from two shapes of one architecture (`family_shapes`, `encoder_shapes`, `seq2seq_shapes`,
`speech`): each setting comes from either, then sizes, switches, activations, windows, experts and scalings are drawn
anew. So a family takes part as soon as it has shapes. What transformers cannot compute itself is drawn again. What we
compute must be equal; what we refuse must name a reason.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.backends.attention.base import AttentionMetadata
from engine.backends.attention.selection import select
from engine.errors import UnsupportedModelError
from engine.model import checkpoint, families
from engine.model.inputs import Inputs
from engine.model.transformer import Transformer
from support import seq2seq_shapes, speech
from support.checkpoints import random_prompt
from support.encoders import ENCODER_SHAPES, EncoderShape, make_encoder_checkpoint
from support.families import FAMILY_SHAPES, FamilyShape, make_family_checkpoint
from support.family_shape import run, watching_routers
from support.pages import Pages, close, load, scattered_tables
from support.reference import MIN_MARGIN
from support.seq2seq import START, Seq2SeqShape, decoder_states, make_seq2seq_checkpoint

Shape = FamilyShape | EncoderShape | Seq2SeqShape

LENGTHS = (37, 1, 14)
MOST_ROUNDING = 5e-5  # half of what `close` allows
SOURCES = (14, 90, 1)  # tokens that an encoder reads for a decoder's prompts
REDRAWN = 30  # how often a configuration is drawn that transformers does not compute

HEADS = ("num_attention_heads", "n_head", "num_heads", "attention_heads", "n_heads", "encoder_attention_heads")
HEADS += ("num_encoder_attention_heads",)
OTHER_HEADS = ("decoder_attention_heads", "num_decoder_attention_heads")  # of the same hidden size
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers")
LAYERS += ("encoder_layers", "decoder_layers", "num_sparse_encoder_layers", "num_sparse_decoder_layers")
LAYERS += ("num_encoder_layers",)
WIDTHS = ("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner", "dff", "hidden_dim", "d_ff")
WIDTHS += ("encoder_ffn_dim", "decoder_ffn_dim")
WINDOWS = ("sliding_window", "window_size", "local_attention", "attention_window", "local_radius", "global_block_size")
WINDOWS += ("relative_attention_num_buckets", "relative_attention_max_distance", "expert_capacity")
WINDOWS += ("num_buckets", "relative_max_distance")
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ACTIVE = ("num_experts_per_tok", "moe_k", "moe_topk")
ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation", "activation", "dense_act_fn")
FUNCTIONS = ("gelu", "gelu_new", "relu", "silu", "tanh", "quick_gelu", "gelu_pytorch_tanh")
SWITCHES = ("bias", "tie_word_embeddings", "scale_embedding", "use_parallel_residual", "qk_norm", "norm_topk")


def shapes_of() -> dict[str, list[Shape]]:
    """The shapes of each architecture that transformers has, checkpoints in older forms left out."""
    found: dict[str, list[Shape]] = {}
    sound = [
        Seq2SeqShape(
            "WhisperForConditionalGeneration",
            {name: value for name, value in settings.items() if name != "vocab_size" and not name.endswith("_id")},
        )
        for settings in speech.SHAPES.values()
    ]
    shapes = (*FAMILY_SHAPES.values(), *ENCODER_SHAPES.values(), *seq2seq_shapes.SHAPES.values(), *sound)
    for shape in shapes:
        name = shape.architecture
        newer = shape.finish in (None, seq2seq_shapes.without_positions)
        if newer and name in families.supported() and hasattr(transformers, name):
            found.setdefault(name, []).append(shape)
    return found


def draw(shapes: list[Shape], rng: random.Random) -> Shape:
    """A shape between two of one architecture, and beyond."""
    one, other = rng.choice(shapes), rng.choice(shapes)
    settings = _mixed(one.settings, other.settings, rng)
    kind = getattr(transformers, one.architecture).config_class
    known = dict(vars(kind(**dict(one.settings)))) | settings
    _resize(settings, known, rng)
    _resize_scans(settings, rng)
    for name, value in known.items():
        if isinstance(value, bool) and any(part in name for part in SWITCHES) and rng.random() < 0.25:
            settings[name] = not value
        if name.endswith(("_eps", "_epsilon")) and isinstance(value, float) and rng.random() < 0.5:
            settings[name] = 10 ** rng.uniform(-6, -2)
        if name in WINDOWS and isinstance(value, int) and value > 1 and rng.random() < 0.5:
            settings[name] = rng.randint(2, 40)
        if name in ACTIVATIONS and isinstance(value, str) and rng.random() < 0.3:
            settings[name] = rng.choice(FUNCTIONS)
        if name == "feed_forward_proj" and rng.random() < 0.5:
            settings[name] = rng.choice(("", "gated-")) + rng.choice(FUNCTIONS)
    rope = known.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope and rng.random() < 0.6:
        settings["rope_parameters"] = rope | _scaling(rng) if rope.get("rope_type") == "default" else rope
        settings["rope_parameters"] |= {"rope_theta": round(10 ** rng.uniform(2, 6))}
    if isinstance(one, Seq2SeqShape):
        settings.pop("src_vocab_size", None)  # follows from the vocabularies that are drawn
        one = replace(one, own_vocab=one.own_vocab and rng.randint(100, 250))
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
        if other := _first(OTHER_HEADS, settings):
            settings[other] = rng.choice([count for count in range(1, 9) if settings[hidden] % count == 0])
    for name in WIDTHS:
        if isinstance(settings.get(name), int) and rng.random() < 0.7:
            settings[name] = rng.randint(5, 80)
    if "d_kv" in settings and rng.random() < 0.5:
        settings["d_kv"] = rng.randint(3, 12)  # scores are not scaled: with more, float32 cannot tell what is equal
    count, active = _first(COUNTS, settings), _first(ACTIVE, settings)
    if count and active and isinstance(settings[active], int) and rng.random() < 0.5:
        settings[count] = rng.randint(2, 9)
        settings[active] = rng.randint(1, settings[count])
    by_layer = any(isinstance(value, list | tuple) for value in settings.values())
    for name in LAYERS:
        if name in settings and not by_layer and rng.random() < 0.4:
            settings[name] = rng.randint(1, 4)


def _resize_scans(settings: dict[str, Any], rng: random.Random) -> None:
    """Other heads of scans, which share the features of a layer; other states and groups."""
    if "mamba_d_head" not in settings:
        return
    inner = settings["mamba_expand"] * settings["hidden_size"]
    heads = rng.choice([count for count in range(1, 13) if inner % count == 0])
    settings |= {"mamba_n_heads": heads, "mamba_d_head": inner // heads, "mamba_d_state": rng.randint(1, 40)}
    settings["mamba_n_groups"] = rng.choice([count for count in range(1, heads + 1) if heads % count == 0])
    if "mamba_d_ssm" in settings:
        settings["mamba_d_ssm"] = inner


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


@dataclass(frozen=True)
class Found:
    """What the reference computes: hidden states of each prompt; logits, of what has a decoder; what its encoder makes
    of each source, where it has both; the smallest margin of a choice of experts."""

    hidden: list[torch.Tensor]
    logits: list[torch.Tensor]
    encoded: list[torch.Tensor]
    margin: float


def compare(architecture: str, number: int, folder: Path) -> str:
    """Draw configuration `number` of an architecture and compare it: "equal", "refused: " with the reason, or "unclear"
    (experts that are chosen by less than rounding, or an encoder whose hidden states depend on rounding).

    Raises:
        AssertionError: hidden states or logits differ; the configuration is in a note.
    """
    rng = random.Random(f"{architecture} {number}")
    shapes = shapes_of()[architecture]
    for _ in range(REDRAWN):
        shape = draw(shapes, rng)
        try:
            found = _reference(_make(shape, folder), shape)
        except Exception:
            continue
        if not all(bool(torch.isfinite(tensor).all()) for tensor in (*found.hidden, *found.logits, *found.encoded)):
            continue
        try:
            return _compare(shape, folder, found)
        except Exception as error:
            if isinstance(error, AssertionError) and _rounding(shape, folder, found) > MOST_ROUNDING:
                return "unclear"
            error.add_note(f"{architecture} {number}: {shape}")
            raise
    raise AssertionError(f"{architecture} {number}: transformers computes none of {REDRAWN} configurations")


def _make(shape: Shape, folder: Path) -> Any:
    """Save a checkpoint; gives the reference model."""
    if isinstance(shape, EncoderShape):
        return make_encoder_checkpoint(shape, folder).model
    if isinstance(shape, Seq2SeqShape):
        return make_seq2seq_checkpoint(shape, folder).model
    return make_family_checkpoint(shape, folder).model


def _lengths(shape: Shape) -> list[int]:
    """Of a shape whose rotary factors depend on the length those at which the reference has the same ones."""
    return list(shape.lengths if isinstance(shape, FamilyShape) else LENGTHS)


def _prompts(shape: Shape) -> list[list[int]]:
    prompts = [random_prompt(shape.vocab, 1000 + length, length) for length in _lengths(shape)]
    if not isinstance(shape, Seq2SeqShape):
        return prompts
    # Padding in a decoder's prompt is another thing to the reference at once than token by token.
    padding = shape.settings.get("pad_token_id", 0)
    return [[START, *(START if token == padding else token for token in prompt[1:])] for prompt in prompts]


def _sources(shape: Seq2SeqShape) -> list[torch.Tensor]:
    """What the encoder reads for each prompt: ids [tokens], or spectra [bins, frames]."""
    bins = shape.settings.get("num_mel_bins")
    if bins is None:
        return [torch.tensor(random_prompt(shape.encoder_vocab, length, length)) for length in SOURCES]
    frames = 2 * shape.settings["max_source_positions"]
    return list(torch.randn(len(SOURCES), bins, frames, generator=torch.Generator().manual_seed(0)))


@torch.no_grad()
def _reference(model: Any, shape: Shape) -> Found:
    prompts = _prompts(shape)
    hidden, logits, encoded = [], [], []
    with watching_routers(model) as margins:
        for row, prompt in enumerate(prompts):
            ids = torch.tensor([prompt])
            if isinstance(shape, EncoderShape):
                masks = {"attention_mask": torch.ones_like(ids)}
                if shape.global_tokens is not None:
                    masks["global_attention_mask"] = torch.tensor([list(shape.global_tokens(prompt))])
                hidden.append(model.base_model(ids, **masks).last_hidden_state[0])
            elif isinstance(shape, Seq2SeqShape):
                source = _sources(shape)[row][None]
                output = model(
                    **{model.main_input_name: source},
                    attention_mask=torch.ones_like(source),
                    decoder_input_ids=ids,
                    output_hidden_states=True,
                    use_cache=False,
                )
                encoded.append(output.encoder_last_hidden_state[0])
                hidden.append(decoder_states(output, len(prompt)))
                logits.append(output.logits[0])
            else:
                trunk = model.base_model
                trunk = trunk.model if trunk is model else trunk  # Llama 4 is its own base
                hidden.append(run(trunk, prompt).last_hidden_state[0])
                logits.append(run(model, prompt).logits[0])
    return Found(hidden, logits, encoded, min(margins, default=math.inf))


def _rounding(shape: Shape, folder: Path, found: Found) -> float:
    """The part of an encoder's largest hidden state that the reference itself loses by computing in float32."""
    if not isinstance(shape, EncoderShape):
        return 0.0
    exact = _reference(_make(shape, folder).double(), shape).hidden
    pairs = zip(found.hidden, exact, strict=True)
    return max(float((rounded - wanted).abs().max() / wanted.abs().max()) for rounded, wanted in pairs)


def _compare(shape: Shape, folder: Path, found: Found) -> str:
    if found.margin < MIN_MARGIN:
        return "unclear"
    prompts = _prompts(shape)
    try:
        spec = families.build_spec(checkpoint.read_config(folder))
    except UnsupportedModelError as error:
        return f"refused: {error}"
    parts = [block.attention for stack in (spec.encoder, spec.decoder) if stack is not None for block in stack.blocks]
    lengths = _lengths(shape)
    most = shape.max_model_len if isinstance(shape, FamilyShape) else max(lengths)
    if isinstance(shape, Seq2SeqShape):
        most = max(most, *(len(ids) for ids in _sources(shape) if ids.dim() == 1), 0)
    model = load(folder, max_model_len=most, backend=select("cpu", parts))
    if model.decoder is None:
        ids = [token for prompt in prompts for token in prompt]
        positions = torch.tensor([place for prompt in prompts for place in range(len(prompt))])
        metadata = AttentionMetadata.build(lengths, lengths, torch.device("cpu"))
        with torch.inference_mode():
            inputs = Inputs(token_ids=torch.tensor(ids), positions=positions, metadata=metadata, tokens=len(ids))
            ours = model(inputs)
        for mine, theirs in zip(ours.split(lengths), found.hidden, strict=True):
            close(mine, theirs)
        return "equal"
    whole = _begin(model, shape, found).step(prompts)
    pages = _begin(model, shape, found)
    pieces: list[list[torch.Tensor]] = [[] for _ in prompts]
    for chunk in (5, 1, 11, max(lengths)):
        steps = [prompt[pages.lengths[row] :][: chunk + row] for row, prompt in enumerate(prompts)]
        for row, states in enumerate(pages.step(steps)):
            pieces[row].append(states)
    for mine, parts_of_it, theirs, scores in zip(whole, pieces, found.hidden, found.logits, strict=True):
        close(mine, theirs)
        close(torch.cat(parts_of_it), theirs)
        with torch.inference_mode():
            close(model.logits(mine), scores)
    return "equal"


def _begin(model: Transformer, shape: Shape, found: Found) -> Pages:
    """Pages for each prompt, and what the encoder makes of its source, where there is one, compared."""
    lengths = _lengths(shape)
    tables = scattered_tables(lengths)
    if not isinstance(shape, Seq2SeqShape):
        return Pages(model, tables, reach=lengths)
    sources = _sources(shape)
    signals = sources if sources[0].dim() > 1 else []
    inputs = [[0] * len(states) for states in found.encoded] if signals else [ids.tolist() for ids in sources]
    first = 1 + max(map(max, tables))
    cross = [[first + page for page in table] for table in scattered_tables([len(ids) for ids in inputs])]
    pages = Pages(model, tables, more=1 + max(map(max, cross)), reach=lengths)
    for mine, theirs in zip(pages.encode(inputs, cross, signals=signals), found.encoded, strict=True):
        close(mine, theirs)
    return pages


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
