"""ViT: an encoder of image patches with a class token (arXiv:2010.11929); DeiT adds a token for its teacher
(arXiv:2012.12877)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import linear, norm
from engine.model.families.encoder_only import token_weights
from engine.model.families.names import LayerNames
from engine.model.families.vision import kernel, layers_weights, patches, pre_norm_encoder
from engine.model.spec import Classifier, FirstStates, Head, ModelSpec, Patches, Pool, Stack
from engine.model.table import Entry, Family, Reshaped, Row, WeightTable

_LAYER = LayerNames(
    qkv=("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    out="attention.output.dense",
    norms=("layernorm_before", "layernorm_after"),
    ffn=("intermediate.dense", "output.dense"),
)


def spec(config: Any) -> ModelSpec:
    name = config.architectures[0]
    first = 2 if name.startswith("DeiT") else 1
    head: Classifier | Pool = Pool()
    if "ForImageClassification" in name:
        if not config.num_labels:
            raise UnsupportedModelError("num_labels of the config is 0: a classifier needs classes.")
        head = Classifier(labels=config.num_labels, pooling="cls")
        if name.endswith("WithTeacher"):
            head = replace(head, pooling=FirstStates(first))
    return ModelSpec(encoder=tower(config, first), decoder=None, head=head)


def tower(config: Any, first: int) -> Stack:
    """The encoder of a config. `first`: learned vectors before those of the patches, 1 in ViT, 2 in DeiT."""
    return pre_norm_encoder(config, patches(config, bias=True, first=first), qkv_bias=config.qkv_bias)


def tower_weights(stack: Stack, source: str) -> list[Entry]:
    """The weights of the encoder; `source`: its name in checkpoints."""
    embedding = stack.embedding
    assert isinstance(embedding, Patches)
    names = ("cls_token", "distillation_token")[: embedding.first]
    return [
        *kernel("encoder.embedding.patches", f"{source}.embeddings.patch_embeddings.projection", embedding),
        Entry(
            "encoder.embedding.first",
            tuple(f"{source}.embeddings.{name}" for name in names),
            Reshaped(((1, 1, embedding.width),) * len(names)),
        ),
        Entry("encoder.embedding.positions", (f"{source}.embeddings.position_embeddings",), Row()),
        *layers_weights(stack, f"{source}.encoder.layer", _LAYER),
        *norm("encoder.final_norm", f"{source}.layernorm", bias=True),
    ]


def unread(source: str) -> tuple[str, ...]:
    """The pooler of the pretraining's task, and the replacement of masked patches."""
    return rf"{source}\.pooler\.dense\.(weight|bias)", rf"{source}\.embeddings\.mask_token"


def weights(model: ModelSpec) -> WeightTable:
    embedding = model.trunk.embedding
    assert isinstance(embedding, Patches)
    source = "vit" if embedding.first == 1 else "deit"
    entries = [*tower_weights(model.trunk, source), *_head_weights(model.head)]
    ignored = [*unread(source)]
    if isinstance(model.head, Pool):
        ignored.append(r"(cls_|distillation_)?classifier\.(weight|bias)")
    return WeightTable(tuple(entries), prefix=f"{source}.", ignored=tuple(ignored))


def _head_weights(head: Head) -> list[Entry]:
    match head:
        case Classifier(pooling=FirstStates()):
            teacher = linear("head.members.1.output", "distillation_classifier", True)
            return [*linear("head.members.0.output", "cls_classifier", True), *teacher]
        case Classifier():
            return token_weights("classifier")
        case _:
            return []


FAMILY = Family(
    name="ViT, DeiT",
    architectures=(
        "ViTModel",
        "ViTForImageClassification",
        "DeiTModel",
        "DeiTForImageClassification",
        "DeiTForImageClassificationWithTeacher",
    ),
    brings="image patches with a class token; DeiT adds a teacher's token and head",
    spec=spec,
    weights=weights,
)
