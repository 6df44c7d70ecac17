"""ViT: an encoder of image patches with a class token (arXiv:2010.11929); DeiT, with one more for its teacher
(arXiv:2012.12877)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import norm
from engine.model.families.encoder_only import token_weights
from engine.model.families.vision import PreNormLayer, kernel, layer_weights, patches, pre_norm_encoder
from engine.model.spec import Classifier, ModelSpec, Patches, Pool
from engine.model.table import Entry, Family, Reshaped, Row, WeightTable

_LAYER = PreNormLayer(
    queries="attention.attention.query",
    keys="attention.attention.key",
    values="attention.attention.value",
    out="attention.output.dense",
    attention_norm="layernorm_before",
    up="intermediate.dense",
    down="output.dense",
    ffn_norm="layernorm_after",
)


def spec(config: Any) -> ModelSpec:
    name = config.architectures[0]
    head: Classifier | Pool = Pool()
    if name.endswith("ForImageClassification"):
        if not config.num_labels:
            raise UnsupportedModelError("num_labels of the config is 0: a classifier needs classes.")
        head = Classifier(labels=config.num_labels, pooling="cls")
    first = 2 if name.startswith("DeiT") else 1
    encoder = pre_norm_encoder(config, patches(config, bias=True, first=first), qkv_bias=config.qkv_bias)
    return ModelSpec(encoder=encoder, decoder=None, head=head)


def weights(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    embedding = model.encoder.embedding
    assert isinstance(embedding, Patches)
    source = "vit" if embedding.first == 1 else "deit"
    names = ("cls_token", "distillation_token")[: embedding.first]
    entries = [
        *kernel("encoder.embedding.patches", f"{source}.embeddings.patch_embeddings.projection", embedding),
        Entry(
            "encoder.embedding.first",
            tuple(f"{source}.embeddings.{name}" for name in names),
            Reshaped(((1, 1, embedding.width),) * len(names)),
        ),
        Entry("encoder.embedding.positions", (f"{source}.embeddings.position_embeddings",), Row()),
        *layer_weights(model.encoder, f"{source}.encoder.layer", _LAYER),
        *norm("encoder.final_norm", f"{source}.layernorm", bias=True),
        *(token_weights("classifier") if isinstance(model.head, Classifier) else ()),
    ]
    # The pooler of the pretraining's task, and what stood for patches that a model was to guess.
    ignored = (rf"{source}\.pooler\.dense\.(weight|bias)", rf"{source}\.embeddings\.mask_token")
    return WeightTable(tuple(entries), prefix=f"{source}.", ignored=ignored)


FAMILY = Family(
    name="ViT, DeiT",
    architectures=("ViTModel", "ViTForImageClassification", "DeiTModel", "DeiTForImageClassification"),
    brings="images as patches, with learned vectors before them: a class token, and DeiT's teacher",
    spec=spec,
    weights=weights,
)
