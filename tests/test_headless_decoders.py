"""Decoders stored without a head, whose output matrix is not tied to the token table: they make vectors, and only that.

Sentence encoders made of decoders are published so.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.driving import finish, make_engine
from support.families import FAMILY_SHAPES, make_family_checkpoint
from support.pages import close

from engine import InvalidRequestError, PoolingParams, SamplingParams

# One shape of each architecture.
SHAPES = {shape.architecture: shape for shape in reversed(FAMILY_SHAPES.values()) if shape.finish is None}


@pytest.mark.parametrize("architecture", SHAPES)
def test_the_last_token_is_the_vector(architecture: str, tmp_path: Path) -> None:
    shape = SHAPES[architecture]
    model = make_family_checkpoint(shape, tmp_path / "full")
    inputs = model.ragged()
    expected = [model.hidden(ids)[0][-1] for ids in inputs]
    headless = model.model.base_model
    headless.config.tie_word_embeddings = False
    headless.save_pretrained(tmp_path / "headless")
    # A budget that cuts inputs into parts.
    engine = make_engine(tmp_path / "headless", max_model_len=shape.max_model_len, max_num_batched_tokens=16)
    assert engine.info.tasks == ("embed",)
    for number, ids in enumerate(inputs):
        engine.add_request(str(number), ids, PoolingParams())
    with pytest.raises(InvalidRequestError, match="cannot serve generate: it has no language-model head"):
        engine.add_request("answer", inputs[0], SamplingParams(max_tokens=1))
    finished = finish(engine)
    engine.close()
    for number, hidden in enumerate(expected):
        pooled = finished[str(number)].pooled
        assert pooled is not None
        close(torch.tensor(pooled.values())[0], hidden / hidden.norm())
