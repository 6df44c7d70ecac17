"""The tasks that a model supports, derived from its parts and its config."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError, UnsupportedModelError
from engine.interface.outputs import Abilities, Activation, SideInfo, Task, TokenVectorsInfo
from engine.model import spec
from engine.model.sentence import MODULES, InputWeights, Pipeline, VocabularyWeights, size_after, torch_class

logger = logging.getLogger("octavo.model")

# Activations that a cross-encoder's config may name, as in sentence-transformers.
_CROSS_ENCODERS: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}


def find_abilities(config: Any, model: spec.ModelSpec, pipeline: Pipeline) -> Abilities:
    """The tasks that the model of a transformers config supports. `pipeline`: the folder's settings for embeddings.
    Raises ModelLoadError if the pipeline does not match the model."""
    embedding = model.trunk.embedding
    found: dict[str, Any] = {"lower_case": pipeline.lower_case, "sides": model.trunk.sides}
    found["filler"] = model.filler
    if isinstance(embedding, spec.Tokens):
        found["second_after"] = embedding.second_after
    both = model.encoder is not None and model.decoder is not None
    if pipeline.modes and (both or isinstance(model.head, spec.Classifier | spec.AnswerSpan | spec.LabelledSpans)):
        logger.warning(
            "%s describes embeddings, but they are not served: the model has a head that %s",
            pipeline.transformer / MODULES,
            _does(model.head, both),
        )
    match model.head:
        case spec.Classifier(labels=count, pooling=pooling):
            tasks: tuple[Task, ...] = ("token_classify",) if pooling is None else ("classify",)
            names = getattr(config, "id2label", None) or {}
            found["labels"] = tuple(str(names.get(i, f"LABEL_{i}")) for i in range(count))
            found["activation"] = _activation(config, model.head, pipeline)
            found["repeats"] = model.repeats
            return Abilities(tasks=tasks, **found)
        case spec.AnswerSpan():
            return Abilities(tasks=("answer",), **found)
        case spec.LabelledSpans(reading=reading):
            return Abilities(tasks=("entities",), entities=reading, **found)
        case spec.Lm() if both:
            return Abilities(tasks=("generate",))
        case spec.Lm():
            tasks = ("generate", "embed")
        case spec.MaskedLm():
            tasks = ("fill_mask", "embed")
        case spec.Embedder(features=features):
            if pipeline.modes is not None:
                raise UnsupportedModelError(
                    f"{pipeline.transformer}: {MODULES} defines how to compute vectors, but the model has a head for "
                    "that. Remove the file."
                )
            return Abilities(tasks=("embed",), embedding_size=features or model.trunk.output_size, **found)
        case _:
            tasks = ("embed",)
    if model.decoder is None and isinstance(embedding, spec.Tokens):
        tasks += _of_tokens(model, pipeline, found)
    elif pipeline.sparse is not None or pipeline.tokens is not None:
        raise UnsupportedModelError(
            f"{pipeline.transformer}: sparse vectors and vectors of tokens are implemented for text encoders only."
        )
    if pipeline.modes is None:
        # Only a decoder's last token has seen all others. If a learned vector precedes an image's patches, it has
        # learned to represent them all.
        has_class = isinstance(embedding, spec.Patches) and embedding.first > 0
        found["pooling_modes"] = ("last",) if model.decoder is not None else ("cls",) if has_class else ("mean",)
        return Abilities(tasks=tasks, embedding_size=model.trunk.output_size, **found)
    if not pipeline.modes and (pipeline.sparse is not None or pipeline.tokens is not None):
        tasks = tuple(task for task in tasks if task != "embed")
        prompts, default = pipeline.prompts, pipeline.default_prompt
        return Abilities(tasks=tasks, prompts=prompts, default_prompt=default, **found)
    if not pipeline.modes:
        raise UnsupportedModelError(
            f"{pipeline.transformer}: the pipeline of {MODULES} has no Pooling module, and the model has no "
            f"classification head. Add a Pooling module, or remove the file."
        )
    return Abilities(
        tasks=tasks,
        embedding_size=pipeline.embedding_size(model.trunk.output_size),
        pooling_modes=pipeline.modes,
        normalize=pipeline.normalize,
        has_projection=bool(pipeline.layers),
        prompts=pipeline.prompts,
        default_prompt=pipeline.default_prompt,
        include_prompt=pipeline.include_prompt,
        **found,
    )


def _of_tokens(model: spec.ModelSpec, pipeline: Pipeline, found: dict[str, Any]) -> tuple[Task, ...]:
    """An encoder's token results besides one vector for all; `found` is extended. Raises ModelLoadError if a layer is
    made for hidden states of another size, or a required head is missing."""
    size, masked = model.trunk.output_size, isinstance(model.head, spec.MaskedLm)
    if pipeline.tokens is not None:
        part = pipeline.tokens
        wide = size_after(part.layers, size)
        sides = _readable(model, pipeline.transformer, part.sides)
        found["token_vectors"] = TokenVectorsInfo(size=wide, first=part.first, sides=sides)
    match pipeline.sparse:
        case InputWeights(layer=layer):
            size_after((layer,), size)
            found["sparse"] = "input"
        case VocabularyWeights() if not masked:
            raise ModelLoadError(
                f"{pipeline.transformer}: SpladePooling of {MODULES} needs the logits of a masked-language-model "
                "head, and the model has none. Use the checkpoint with its head."
            )
        case _ if masked:
            found["sparse"] = "vocabulary"
        case _:
            return ("token_embed",)
    return ("token_embed", "sparse_embed")


def _readable(model: spec.ModelSpec, folder: Path, sides: Mapping[str, SideInfo]) -> dict[str, SideInfo]:
    """The sides in a form that this model can compute: if a layer cannot exclude keys from attention, texts are not
    filled up with tokens that none attends to, and the log says so."""
    found = dict(sides)
    for name, side in sides.items():
        if side.filled and not side.attended and not all(map(_leaves_keys_out, model.trunk.blocks)):
            logger.warning(
                "%s: a %s is not padded with masks, because this model's layers cannot exclude them from attention.",
                folder,
                name,
            )
            found[name] = replace(side, filled=False)
    return found


def _leaves_keys_out(block: spec.Block) -> bool:
    """Whether a layer mixes tokens only by attention, over keys that may be fewer than its queries. DeBERTa's attention
    could do this, but in its reference the tokens that none attends to attend to nothing themselves."""
    part = block.attention
    others = (part.spans, block.mixing, block.beside)
    plain = not isinstance(part.sees, spec.Sparse) and not part.content_bias and others == (None,) * len(others)
    return part.heads > 0 and not part.causal and plain


def _does(head: spec.Head, both: bool) -> str:
    if isinstance(head, spec.AnswerSpan):
        return "answers questions"
    if isinstance(head, spec.LabelledSpans):
        return "finds entities"
    return "generates" if both and not isinstance(head, spec.Classifier) else "classifies"


def _activation(config: Any, head: spec.Classifier, pipeline: Pipeline) -> Activation:
    """The activation that sentence-transformers wrote for a cross-encoder; else that of transformers' pipelines: for
    texts by the kind of problem or by the number of classes, for tokens always softmax. Raises UnsupportedModelError if
    it names a torch function that is not implemented."""
    if head.pooling is None:
        return "softmax"
    named = pipeline.activation or _cross_encoders(config)
    name = None if named is None else torch_class(named)
    if name in _CROSS_ENCODERS:
        return _CROSS_ENCODERS[name]
    if name is not None:
        raise UnsupportedModelError(
            f"The cross-encoder's activation is {named}; of torch.nn, {', '.join(_CROSS_ENCODERS)} are implemented."
        )
    kind = getattr(config, "problem_type", None)
    if kind == "regression":
        return "none"
    if kind == "multi_label_classification" or head.labels == 1:
        return "sigmoid"
    return "softmax"


def _cross_encoders(config: Any) -> str | None:
    """The activation that sentence-transformers (this version or before 4.0) wrote into a cross-encoder's config."""
    kept = getattr(config, "sentence_transformers", None)
    name = kept.get("activation_fn") if isinstance(kept, dict) else None
    if name is None:
        name = getattr(config, "sbert_ce_default_activation_function", None)
    return name if isinstance(name, str) else None
