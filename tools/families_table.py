#!/usr/bin/env python3
"""Writes the table in docs/families.md, and what `octavo models` lists, from the registry of families.

    make docs               or: python3 tools/setup.py docs

What a family can be asked for follows from the parts of its architectures' default configs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_PRETRAINING_MAPPING_NAMES,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from engine.errors import UnsupportedModelError
from engine.interface.outputs import Task
from engine.interface.request import SamplingParams
from engine.model.abilities import find_abilities
from engine.model.families import FAMILIES, describe
from engine.model.families.entities import ENCODERS, KIND
from engine.model.missing import unsupported
from engine.model.sentence import Pipeline
from engine.model.spec import ModelSpec
from engine.model.table import Family

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "families.md"
LISTED = ROOT / "cli" / "commands" / "families.json"  # read without the engine, which takes seconds
COMMAND = "python3 tools/setup.py docs"
BEGIN = "<!-- families: written by `make docs` from the registry; do not edit by hand -->"
END = "<!-- end of families -->"
HEAD = """\
| family | features | architectures | serves |
|---|---|---|---|
"""

# What can be done with the next token's probabilities, and the setting of a request that asks for it.
MODES = {"greedy": "temperature", "top-k": "top_k", "top-p": "top_p", "min-p": "min_p", "beams": "num_beams"}
# What else models are asked for.
TASKS: dict[Task, str] = {
    "embed": "embeddings",
    "classify": "classification",
    "token_classify": "token classification",
    "answer": "question answering",
    "fill_mask": "fill-mask",
    "token_embed": "token embeddings",
    "sparse_embed": "sparse embeddings",
    "entities": "entities",
}
# Where transformers lists the classes of each kind.
MAPPINGS: tuple[Any, ...] = (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_PRETRAINING_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
)
# Classes that it lists nowhere.
UNLISTED = {
    "CLIPTextModelWithProjection": "clip_text_model",
    "CLIPVisionModelWithProjection": "clip_vision_model",
    "HF_ColBERT": "bert",
    "SiglipTextModel": "siglip_text_model",
    "VisionEncoderDecoderModel": "vision-encoder-decoder",
}
# What the defaults of transformers lack to be a model.
COMPLETED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1},
    "glm4_moe": {"head_dim": 128},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "t5": {"decoder_start_token_id": 0},
    "mt5": {"decoder_start_token_id": 0},
    "vision-encoder-decoder": {
        "encoder": {"model_type": "vit"},
        "decoder": {"model_type": "trocr", "cross_attention_hidden_size": 768},
    },
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
}
# Families that transformers has no classes for: the kind that their configs name, and what these set.
ELSEWHERE: dict[str, tuple[str, dict[str, str]]] = {
    "Jina v2": ("bert", {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}),
}


# No family of its own: a head over an encoder of several, which its files name instead of an architecture.
GLINER: dict[str, Any] = {
    "family": "GLiNER",
    "brings": f"scores spans of words against the request's labels, over {', '.join(ENCODERS)}",
    "architectures": [KIND],
    "serves": [TASKS["entities"]],
}


def table(families: Iterable[Family] = FAMILIES) -> str:
    """Markdown, one line per family that is served; families that are only described are left out.

    Raises:
        UnsupportedModelError: a family claims to be served, and its default model is not.
    """
    return HEAD + "".join(map(line, rows(families)))


def rows(families: Iterable[Family] = FAMILIES) -> list[dict[str, Any]]:
    """The content of each line, in the order of their names."""
    found = [GLINER, *(row(family) for family in families if family.weights is not None)]
    return sorted(found, key=lambda shown: str(shown["family"]).lower())


def line(shown: dict[str, Any]) -> str:
    """A row as Markdown."""
    names = ", ".join(f"`{name}`" for name in shown["architectures"])
    cells = (shown["family"], shown["brings"], names, ", ".join(shown["serves"]))
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |\n"


def row(family: Family) -> dict[str, Any]:
    """The facts of a family; without the names of headless models if it generates, because they serve the same."""
    tasks = {name: tasks_of(family, name) for name in family.architectures}
    names = [name for name in family.architectures if name not in family.headless]
    generating = {name for name in names if "generate" in tasks[name]}
    if generating:
        differ = {name: tasks[name] for name in names if tasks[name] != tasks[names[0]]}
        assert not differ, f"the architectures of {family.name} differ in what they can do: {differ}"
    else:
        names = list(family.architectures)
    names += (joint := joint_classifiers(family))
    tasks |= {name: tasks_of(family, name) for name in joint}
    served = {task for name in names for task in tasks[name]}
    serves = [*(decoding() if generating else ()), *(word for task, word in TASKS.items() if task in served)]
    return {"family": family.name, "brings": family.brings, "architectures": names, "serves": serves}


def joint_classifiers(family: Family) -> list[str]:
    """The classifiers of a family with encoder and decoder, which it serves without a list of their names."""
    if family.repeats is None:
        return []
    return [f"{name.removesuffix('Model')}ForSequenceClassification" for name in family.headless]


def listed(families: Iterable[Family] = FAMILIES) -> str:
    """The same as JSON, an object per line."""
    return json.dumps(rows(families), indent=1, ensure_ascii=False) + "\n"


def decoding() -> tuple[str, ...]:
    """How answers of a model that generates can be chosen."""
    settings = {field.name for field in fields(SamplingParams)}
    return tuple(mode for mode, setting in MODES.items() if setting in settings)


def tasks_of(family: Family, architecture: str) -> tuple[Task, ...]:
    """The tasks that models of this architecture can serve.

    Raises:
        UnsupportedModelError: parts are not implemented.
    """
    config, model = default_model(family, architecture)
    if missing := unsupported(model):
        raise UnsupportedModelError(f"needs parts that are not implemented: {', '.join(missing)}")
    return find_abilities(config, model, Pipeline(transformer=Path())).tasks


def default_model(family: Family, architecture: str) -> tuple[Any, ModelSpec]:
    """The config and parts of the model that transformers makes of this name by default."""
    if family.name in ELSEWHERE:
        kind, settings = ELSEWHERE[family.name]
        config = CONFIG_MAPPING[kind](architectures=[architecture], **settings)
        return config, family.spec(config)
    listed: dict[str, str] = {}
    for mapping in MAPPINGS:
        named = {name: kind for kind, name in mapping.items() if isinstance(name, str)}
        listed = named | listed  # the first mapping that has a name says what it is
    kinds = UNLISTED | listed
    # A name that only older checkpoints have stands for the family's first.
    known = [name for name in (architecture, *family.architectures) if name in kinds]
    if not known:
        raise UnsupportedModelError(f"{family.name}: transformers has none of {', '.join(family.architectures)}")
    kind = kinds[known[0]]
    config = CONFIG_MAPPING[kind](architectures=[architecture], **COMPLETED.get(kind, {}))
    return config, describe(config) if architecture in joint_classifiers(family) else family.spec(config)


def replaced(text: str, content: str) -> str:
    """The text with what is between the markers replaced.

    Raises:
        ValueError: a marker is missing or there twice.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{PAGE.name} must hold each of these lines once: {BEGIN} and {END}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{content}{END}{rest.split(END)[1]}"


def main() -> int:
    for path, wanted in (
        (PAGE, replaced(PAGE.read_text(encoding="utf-8"), table())),
        (LISTED, listed()),
    ):
        current = path.exists() and path.read_text(encoding="utf-8") == wanted
        if not current:
            path.write_text(wanted, encoding="utf-8")
        print(f"{path.name}: {'was current' if current else 'written'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
