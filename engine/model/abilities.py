"""What a model can serve, by its parts and its config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.model import spec
from engine.outputs import Activation, PoolingMode, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """The fields of `engine.outputs.EngineInfo` of these names, which describe them."""

    tasks: tuple[Task, ...]
    embedding_size: int = 0
    pooling_modes: tuple[PoolingMode, ...] = ()
    normalize: bool = True
    has_projection: bool = False
    labels: tuple[str, ...] = ()
    activation: Activation = "none"
    token_types: int = 0

    def facts(self) -> dict[str, Any]:
        """The fields by their names."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def find_abilities(config: Any, model: spec.ModelSpec) -> Abilities:
    """What the model of a transformers config can serve."""
    embedding = model.trunk.embedding
    types = embedding.token_types if isinstance(embedding, spec.Tokens) else 0
    match model.head:
        case spec.Classifier(labels=count, pooling=pooling):
            tasks: tuple[Task, ...] = ("token_classify",) if pooling is None else ("classify",)
            names = getattr(config, "id2label", None) or {}
            labels = tuple(str(names.get(i, f"LABEL_{i}")) for i in range(count))
            return Abilities(tasks=tasks, labels=labels, activation=_activation(config, model.head), token_types=types)
        case spec.Lm() if model.encoder is not None:
            return Abilities(tasks=("generate",))
        case spec.Lm():
            tasks = ("generate", "embed")
        case spec.MaskedLm():
            tasks = ("fill_mask", "embed")
        case _:
            tasks = ("embed",)
    return Abilities(
        tasks=tasks,
        embedding_size=model.trunk.output_size,
        # A decoder's last token alone has seen all others.
        pooling_modes=("mean",) if model.decoder is None else ("last",),
        token_types=types,
    )


def _activation(config: Any, head: spec.Classifier) -> Activation:
    """As transformers' pipelines have it: by the kind of problem, else by the number of classes."""
    kind = getattr(config, "problem_type", None)
    if kind == "regression":
        return "none"
    if kind == "multi_label_classification" or (head.labels == 1 and head.pooling is not None):
        return "sigmoid"
    return "softmax"
