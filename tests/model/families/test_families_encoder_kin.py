"""Encoders with parts that BERT's lacks: weights that layers share, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.encoders import ENCODER_SHAPES, make_encoder_checkpoint
from support.pages import CPU, load
from support.published import (
    ALBERT_BASE_V2,
    BIG_BIRD_BASE,
    CONVBERT_BASE,
    ESM2_8M,
    JINA_V2_SMALL,
    MOBILEBERT,
    XLM_MLM_EN,
    read,
)

from engine.backends.attention.base import AttentionMetadata
from engine.errors import UnsupportedModelError
from engine.model.attention_operations import Attend
from engine.model.embedding import mask_out
from engine.model.operations import Multiply
from engine.model.spec import (
    MaskedOut,
    Repeated,
    Stack,
    Tokens,
)

XLM_CLASSES = XLM_MLM_EN | {"architectures": ["XLMForSequenceClassification"]}


# ---------------------------------------------------------------- layers of the same weights


def test_layers_share_one_module(tmp_path: Path) -> None:
    """They are in memory once, plain and of few bits, and run as often as the config says."""
    subject = make_encoder_checkpoint(ENCODER_SHAPES["albert"], tmp_path)
    model = load(tmp_path, max_model_len=40)
    assert model.encoder is not None
    reference = sum(p.nbytes for n, p in subject.model.named_parameters() if not n.startswith("pooler"))
    assert model.weight_bytes() == reference
    operations = model.encoder.program.operations
    attends = [one for one in operations if isinstance(one, Attend)]
    assert len(attends) == 3
    assert len({id(one.module) for one in attends}) == 1
    products = [one.linear for one in operations if isinstance(one, Multiply)]
    assert (len(products), len(set(map(id, products)))) == (12, 4)


def test_groups_run_one_after_the_other() -> None:
    stack = Stack(hidden_size=1, embedding=Tokens(vocab_size=1, width=1), blocks=(), final_norm=None)
    assert stack.order == ()
    blocks: Any = ("a", "b", "c", "d")
    made = Stack(
        hidden_size=1,
        embedding=stack.embedding,
        blocks=blocks,
        final_norm=None,
        repeated=Repeated(length=2, times=3),
    )
    assert made.order == (0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3)


# ---------------------------------------------------------------- inputs that are scaled by their masks


def test_masks_scale_their_own_input_alone() -> None:
    ids = torch.tensor([5, 1, 1, 1, 5, 5, 1, 0])
    x = torch.ones(8, 2)
    found = mask_out(x, ids, MaskedOut(5, 0.12), AttentionMetadata.build([4, 3], [4, 3], CPU), tokens=7)[:, 0]
    one, two = 0.88 / (1 - 1 / 4), 0.88 / (1 - 2 / 3)
    torch.testing.assert_close(found, torch.tensor([0, one, one, one, 0, 0, two, 1]))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (ALBERT_BASE_V2, {"num_hidden_groups": 5}, "num_hidden_layers .* multiple of num_hidden_groups 5, got 12"),
        (ESM2_8M, {"position_embedding_type": "relative_key"}, "'relative_key'; implemented for this family: absolute"),
        (ESM2_8M, {"mask_token_id": None}, "token_dropout, so mask_token_id must be an id from 0 to 32; got None"),
        (ESM2_8M, {"is_decoder": True}, "The config sets is_decoder"),
        (ESM2_8M, {"num_attention_heads": 64}, "heads have 5 features, but rotary positions need an even number"),
        (JINA_V2_SMALL, {"position_embedding_type": "absolute"}, "must be 'alibi' for this family, got 'absolute'"),
        (JINA_V2_SMALL, {"feed_forward_type": "original"}, "'original'; implemented: geglu, reglu"),
        (
            JINA_V2_SMALL,
            {"auto_map": {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}},
            "norms of queries and keys .* The models for texts are served",
        ),
        (MOBILEBERT, {"use_bottleneck": False}, "use_bottleneck of the config must be true"),
        (MOBILEBERT, {"normalization_type": "layer_norm"}, "'layer_norm'; implemented: no_norm"),
        (MOBILEBERT, {"key_query_shared_bottleneck": False}, "sets neither use_bottleneck_attention nor key_query"),
        (MOBILEBERT, {"embedding_size": 513}, "embedding_size of the config must be at most its hidden_size 512"),
        (CONVBERT_BASE, {"conv_kernel_size": 4}, "conv_kernel_size of the config must be odd, .* got 4"),
        (CONVBERT_BASE, {"num_groups": 5}, "hidden_size of the config must be a multiple of its num_groups 5, got 768"),
        (
            CONVBERT_BASE,
            {"hidden_size": 12, "head_ratio": 1},
            "but 12 attention heads and as many convolution heads",
        ),
        (BIG_BIRD_BASE, {"attention_type": "full"}, "must be block_sparse or original_full, got 'full'"),
        (
            BIG_BIRD_BASE,
            {"architectures": ["BigBirdForQuestionAnswering"], "sep_token_id": None},
            "sep_token_id of the config must be the id",
        ),
        (XLM_MLM_EN, {"causal": True}, "causal of the config must be false"),
        (XLM_MLM_EN, {"is_encoder": False}, "is_encoder of the config must be true"),
        (XLM_MLM_EN, {"asm": True}, "asm of the config must be false"),
        (XLM_CLASSES, {"summary_type": "attn"}, "'attn'; implemented: first, last, mean, cls_index"),
        (XLM_CLASSES, {"summary_activation": "tanh"}, "summary_activation of the config is 'tanh', .* must be null"),
        (XLM_CLASSES, {"summary_use_proj": False}, "summary_use_proj of the config must be true"),
        (XLM_CLASSES, {"summary_proj_to_labels": False}, "summary_proj_to_labels of the config must be true"),
    ],
)
def test_refusals(config: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, config, **settings)
