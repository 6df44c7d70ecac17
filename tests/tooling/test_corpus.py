"""The record of answers that a change of the inside is compared by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import corpus
from support.encoders import ENCODER_SHAPES, make_encoder_checkpoint
from support.families import FAMILY_SHAPES, make_family_checkpoint


@pytest.mark.slow
def test_a_record_is_repeatable_and_shows_a_change(tmp_path: Path) -> None:
    make_family_checkpoint(FAMILY_SHAPES["llama"], tmp_path / "llama")
    make_encoder_checkpoint(ENCODER_SHAPES["bert"], tmp_path / "bert")
    files = [tmp_path / "before.json", tmp_path / "after.json"]
    for file in files:
        assert corpus.main(["record", str(tmp_path), str(file), "--only", "llama", "bert"]) == 0
    before, after = (json.loads(file.read_text()) for file in files)
    assert len(before) == len(corpus.FORMATS) * len(corpus.SEARCHES) + 4  # an encoder has no pages
    assert not any(isinstance(answer, str) for answer in before.values()), "something was refused"
    assert before == after
    assert corpus.main(["compare", *map(str, files)]) == 0

    case = "llama | bfloat16 | beams"
    after[case][0][0][0]["cumulative_logprob"] = (-1.0).hex()
    files[1].write_text(json.dumps(after))
    assert corpus.differences(before, after) == [case]
    assert corpus.main(["compare", *map(str, files)]) == 1
