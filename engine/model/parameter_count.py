"""Compares the number of parameters that a config asks for with the files of its checkpoint."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ModelLoadError
from engine.model.positions import QueryBuckets
from engine.model.spec import (
    Attention,
    Block,
    Clamped,
    Dense,
    Experts,
    FeedForward,
    ModelSpec,
    NormedSum,
    Opened,
    Shared,
    Stack,
    Tokens,
)
from engine.model.stored.scheme import Scheme
from engine.model.weight_files import Checkpoint


def check_parameters(path: Path, model: ModelSpec, scheme: Scheme | None = None) -> None:
    """Refuse a config that asks for more weights than a checkpoint's files can contain, before anything is built.
    `scheme`: the storage format of quantised weights. Raises ModelLoadError if there are fewer bytes, and fewer
    quantised numbers, than parameters; or there are no files."""
    with Checkpoint(path, scheme) as checkpoint:  # a damaged file causes another error
        size = sum(file.stat().st_size for file in checkpoint.files)
        most = max(size, checkpoint.num_elements)
    beside = [None if model.twin is None else model.twin.encoder, None if model.vision is None else model.vision.tower]
    least = sum(_parameters(stack) for stack in (model.encoder, model.decoder, *beside) if stack is not None)
    table = model.trunk.embedding
    if isinstance(table, Tokens):
        least += (table.vocab_size + 4 * table.boxes) * table.width
    if least > most:
        layers = sum(len(stack.order) for stack in (model.encoder, model.decoder) if stack is not None)
        raise ModelLoadError(
            f"{path / 'config.json'} describes a model of at least {least} parameters ({layers} layers of "
            f"{model.trunk.hidden_size} features, {model.vocab_size} token ids), but the weight files hold {size} "
            "bytes. Correct it, or download the checkpoint again."
        )


def _parameters(stack: Stack) -> int:
    """The number of parameters of the layers' matrices and of the vectors beside the tokens."""
    beside = stack.global_vectors + (0 if stack.predicting is None else stack.predicting.vectors)
    return sum(_of_block(block, stack.hidden_size) for block in stack.blocks) + beside * stack.hidden_size


def _of_block(block: Block, features: int) -> int:
    narrow = block.bottleneck
    if narrow is not None:
        within = _of_attention(block.attention, narrow.width) + narrow.networks * _of_ffn(block.ffn, narrow.width)
        return within + 2 * narrow.width * features
    cross = 0 if block.cross is None or block.merged else _of_attention(block.cross, features)
    return _of_attention(block.attention, features) + cross + _of_ffn(block.ffn, features)


def _of_attention(part: Attention, features: int) -> int:
    taps = 0 if part.spans is None else features * part.spans.kernel
    if part.latent is not None:
        width, query = part.latent.width, part.latent.query_width
        queries = part.heads * (part.latent.content + part.latent.rotary)
        made = features * queries if query is None else query * (features + queries)
        expanded = part.heads * width * (part.latent.content + part.latent.values)
        return made + features * part.head_dim + expanded + part.heads * part.latent.values * features
    if part.value_scores is not None:
        return features * part.value_scores.features * 2 * (part.heads + part.kv_heads)
    scores = features * part.position.buckets * part.heads if isinstance(part.position, QueryBuckets) else 0
    if part.routed is not None:
        return 2 * features * part.head_dim * part.kv_heads * (part.routed.count + 1)
    if part.reads is not None:
        return features * part.head_dim * 2 * part.heads
    keys = part.kv_heads if part.one_for_both else 2 * part.kv_heads
    return taps + scores + features * part.head_dim * (2 * part.heads + keys)


def _of_ffn(part: FeedForward | Clamped, features: int) -> int:
    if isinstance(part, Shared):
        always = part.always.inner if isinstance(part.always, Opened) else part.always
        return _of_ffn(part.routed, features) + _of_ffn(always, features)
    if isinstance(part, NormedSum):
        return _of_ffn(part.routed, features) + _of_ffn(part.always, features)
    if isinstance(part, Experts):
        return part.count * _of_ffn(part.expert, features)
    return features * part.width * (2 if isinstance(part, Dense) else 3)
