"""The common part of encoder-only families: BERT's stack and the usual heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation as activation_of
from engine.model.families.common import dense_network, linear, multi_head, norm, same_layers
from engine.model.normalisation import Norm
from engine.model.positions import Learned, Rotary
from engine.model.spec import (
    Activation,
    AnswerSpan,
    Attention,
    Block,
    Classifier,
    Dense,
    Gated,
    Head,
    MaskedLm,
    ModelSpec,
    Pool,
    Post,
    Pre,
    Stack,
    Tokens,
)
from engine.model.table import Entry


def check_settings(config: Any, positions: str = "absolute") -> None:
    """Refuse settings that would make another kind of model. `positions`: the position_embedding_type that the family
    supports. Raises UnsupportedModelError if the config describes a decoder, positions in attention, or a model without
    heads."""
    for name in ("is_decoder", "add_cross_attention"):
        if getattr(config, name, False):
            raise UnsupportedModelError(
                f"The config sets {name}: this architecture is served as an encoder only, which sees all tokens of "
                "an input. Set it to false if the checkpoint was trained as an encoder."
            )
    kind = getattr(config, "position_embedding_type", None)
    if kind not in (None, positions):
        meaning = " (positions that are added to the tokens' vectors)" if positions == "absolute" else ""
        raise UnsupportedModelError(
            f"position_embedding_type of the config is {kind!r}; implemented: {positions}{meaning}."
        )
    if getattr(config, "pruned_heads", None):
        raise UnsupportedModelError(
            "The config has pruned_heads: layers with fewer heads than others are not implemented. Use the "
            "checkpoint that it was made from."
        )


def positions_after_padding(config: Any, padding: int | None) -> Learned:
    """Learned positions that begin after the padding's row and do not count tokens with its id (fairseq). Raises
    UnsupportedModelError if the id is not a token, or the table has no row after its own."""
    size = config.max_position_embeddings
    if not isinstance(padding, int) or not 0 <= padding < size - 1:
        raise UnsupportedModelError(
            f"pad_token_id of the config must be from 0 to {size - 2}, below its max_position_embeddings {size}, since "
            f"positions are counted from the row after it; got {padding!r}."
        )
    return Learned(size, offset=padding + 1, unplaced=padding)


def post_norm_encoder(
    config: Any,
    embedding: Tokens,
    layer_norm: Norm,
    *,
    attention: Attention | None = None,
    ffn: Dense | Gated | None = None,
) -> Stack:
    """BERT's encoder: norms after the residual, biases everywhere (arXiv:1810.04805). `attention`: None for heads that
    share hidden_size evenly. `ffn`: None for a network with intermediate_size and hidden_act. Raises
    UnsupportedModelError if the heads cannot share hidden_size."""
    block = Block(
        placement=Post(layer_norm, layer_norm),
        attention=attention or multi_head(config, causal=False),
        ffn=ffn or dense_network(config),
    )
    return same_layers(config, embedding, block)


def pre_norm(encoder: Stack, layer_norm: Norm) -> Stack:
    """An encoder with norms before its sublayers and one at its end, instead of norms after sublayers."""
    blocks = tuple(replace(block, placement=Pre(layer_norm, layer_norm)) for block in encoder.blocks)
    return replace(encoder, blocks=blocks, final_norm=layer_norm)


def turned(encoder: Stack, theta: float, *, interleaved: bool = False, in_float32: bool = False) -> Stack:
    """An encoder whose positions rotate all features of its heads. Raises UnsupportedModelError if a head has an odd
    number of features."""
    head_dim = encoder.blocks[0].attention.head_dim
    if head_dim % 2:
        raise UnsupportedModelError(
            f"The config's heads have {head_dim} features, but rotary positions need an even number."
        )
    position = Rotary(head_dim, theta, interleaved=interleaved, in_float32=in_float32)
    blocks = (replace(block, attention=replace(block.attention, position=position)) for block in encoder.blocks)
    return replace(encoder, blocks=tuple(blocks))


def token_classifier(config: Any) -> Classifier:
    """One matrix over each token."""
    return Classifier(labels=config.num_labels, pooling=None)


def first_token_classifier(config: Any, activation: Activation) -> Classifier:
    """Two layers over the first token."""
    return Classifier(labels=config.num_labels, pooling="cls", activation=activation)


def answer_span(config: Any, **parts: Any) -> AnswerSpan:
    """The head of a model that finds answers. `parts`: its dense layer, if it has one. Raises UnsupportedModelError if
    it has a number of outputs per token other than two."""
    if config.num_labels != 2:
        raise UnsupportedModelError(
            f"num_labels of the config is {config.num_labels}, but a model that finds answers has 2 scores per "
            "token, for an answer's beginning and end."
        )
    return AnswerSpan(**parts)


def question_end(config: Any) -> int:
    """The id of the token that ends the question before a text. Raises UnsupportedModelError if the config does not
    contain it."""
    if not isinstance(config.sep_token_id, int):
        raise UnsupportedModelError(
            f"sep_token_id of the config must be the id of the token that ends a question, got {config.sep_token_id!r}."
        )
    return config.sep_token_id


def masked_lm(config: Any, activation: Activation, eps: float) -> MaskedLm:
    """A dense layer and a norm before the vocabulary's matrix."""
    return MaskedLm(tied=config.tie_word_embeddings, activation=activation, norm=Norm("layer", eps, bias=True))


def named_head(
    config: Any, masked: MaskedLm, activation: Activation, masked_names: tuple[str, ...] = ("ForMaskedLM",)
) -> Head:
    """The head that the architecture's name ends with.

    Args:
        masked: the head for names that end with one of `masked_names`.
        activation: between the two layers over the first token.
    """
    name = config.architectures[0]
    if name.endswith(masked_names):
        return masked
    if name.endswith("ForSequenceClassification"):
        return first_token_classifier(config, activation)
    if name.endswith("ForQuestionAnswering"):
        return answer_span(config)
    return token_classifier(config) if name.endswith("ForTokenClassification") else Pool()


def bert_head(config: Any) -> Head:
    """The head of a config like BERT's."""
    masked = masked_lm(config, activation_of(config.hidden_act), config.layer_norm_eps)
    return named_head(config, masked, "tanh", ("ForMaskedLM", "ForPreTraining"))


def roberta_head(config: Any) -> Head:
    """The head of a config like RoBERTa's: GELU before the vocabulary, regardless of hidden_act."""
    return named_head(config, masked_lm(config, "gelu", config.layer_norm_eps), "tanh")


def bert_stack(config: Any, positions: Learned | None, width: int | None = None) -> Stack:
    """The encoder of a config like BERT's. `width`: features of the embeddings, hidden_size by default. Raises
    UnsupportedModelError if no part expresses a setting."""
    check_settings(config)
    layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
    width = width or config.hidden_size
    return post_norm_encoder(
        config,
        Tokens(
            vocab_size=config.vocab_size,
            width=width,
            positions=positions,
            token_types=config.type_vocab_size,
            norm=layer_norm,
            expansion=None if width == config.hidden_size else config.hidden_size,
        ),
        layer_norm,
    )


def embedding_weights(model: ModelSpec, source: str, layer_norm: str = "embeddings.LayerNorm") -> list[Entry]:
    """The embedding tables and their norm, under BERT's names."""
    assert isinstance(model.trunk.embedding, Tokens)
    embedding = model.trunk.embedding
    tables = {"tokens": "word_embeddings"}
    if embedding.positions is not None:
        tables["positions"] = "position_embeddings"
    if embedding.token_types:
        tables["types"] = "token_type_embeddings"
    if embedding.tasks:
        tables["tasks"] = "task_type_embeddings"
    entries = [
        Entry(f"encoder.embedding.{ours}", (f"{source}.embeddings.{theirs}.weight",)) for ours, theirs in tables.items()
    ]
    if embedding.boxes:
        entries += [
            Entry(f"encoder.embedding.boxes.{ours}", (f"{source}.embeddings.{theirs}_position_embeddings.weight",))
            for ours, theirs in {"columns": "x", "rows": "y", "heights": "h", "widths": "w"}.items()
        ]
    if embedding.norm is not None:
        entries += norm("encoder.embedding.norm", f"{source}.{layer_norm}", bias=True)
    return entries


def layer_target(number: int, block: Block) -> str:
    """The prefix of the names of a layer's parameters; parameters beside the layer have other names."""
    return f"encoder.blocks.{number}" if block.beside is None else f"encoder.blocks.{number}.inner"


def masked_lm_weights(
    head: MaskedLm, *, dense: str, layer_norm: str, output: str, bias: str | None = None
) -> list[Entry]:
    """A masked-language-model head under these names.

    Args:
        output: name of the matrix, which may be stored instead of the token table that it is tied to.
        bias: name of the output's bias, if it has a separate name; the matrix's own bias takes precedence, because it
            is the one that is added if both are stored.
    """
    biases = [f"{output}.bias"] if bias is None else [f"{output}.bias", bias]
    return [
        *linear("head.dense", dense, True),
        *norm("head.norm", layer_norm, bias=True),
        *vocabulary_weights(head, output, biases),
    ]


def vocabulary_weights(head: MaskedLm, output: str, biases: Sequence[str]) -> list[Entry]:
    """The last matrix of a masked-language-model head, and its bias under any of these names."""
    return [
        *(Entry("head.output.bias", (name,)) for name in biases),
        Entry("encoder.embedding.tokens" if head.tied else "head.output.weight", (f"{output}.weight",)),
    ]


def first_token_weights(dense: str, output: str) -> list[Entry]:
    """Two layers over the first token under these names."""
    return [*linear("head.dense", dense, True), *linear("head.output", output, True)]


def token_weights(source: str) -> list[Entry]:
    """One matrix over each token under this name."""
    return linear("head.output", source, True)


def answer_weights() -> list[Entry]:
    """The matrix that finds answers."""
    return token_weights("qa_outputs")
