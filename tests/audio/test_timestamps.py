"""The rules of timestamps: what may come is what the logits processors of `transformers` leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from engine import InvalidRequestError, ModelLoadError, SamplingParams
from engine.execution.sampler import sample
from engine.execution.weighing import weighed
from engine.interface.outputs import SpeechInfo
from engine.interface.request import Decoding
from engine.interface.sampling_table import mask_words, neutral_rows
from engine.interface.speech import TimestampRules, read_speech, timed
from engine.scheduling.plan import SamplingBatch

VOCAB, END, NO_TIMESTAMPS = 133, 60, 69
BEGIN = 3
SUPPRESSED, SUPPRESSED_FIRST = [4, 5, 61, 62], [7, END]


def info(most: int | None) -> SpeechInfo:
    return SpeechInfo(no_timestamps_id=NO_TIMESTAMPS, max_initial_timestamp=most)


def reference(most: int | None) -> list[Any]:
    config = GenerationConfig(eos_token_id=END)
    config.no_timestamps_token_id = NO_TIMESTAMPS
    if most is not None:
        config.max_initial_timestamp_index = most
    return [
        SuppressTokensAtBeginLogitsProcessor(SUPPRESSED_FIRST, BEGIN),
        SuppressTokensLogitsProcessor(SUPPRESSED),
        WhisperTimeStampLogitsProcessor(config, begin_index=BEGIN),
    ]


def batch_of(rules: list[TimestampRules], **columns: Any) -> SamplingBatch:
    masks = np.zeros((len(rules), mask_words(VOCAB)), dtype=np.uint32)
    for row, one in zip(masks, rules, strict=True):
        one.fill(row)
    count = len(rules)
    return SamplingBatch(
        rows=np.arange(count, dtype=np.int32),
        table=neutral_rows(count, **columns),
        uniforms=np.zeros((count, 1)),
        masked=np.arange(count, dtype=np.int32),
        masks=masks,
        outweighed=np.full(count, rules[0].outweighed_from, dtype=np.int32),
    )


def left(masks: np.ndarray) -> np.ndarray:
    return np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB].astype(bool)


@pytest.mark.parametrize("most", [None, 0, 5])
def test_what_may_come_is_what_the_reference_leaves(most: int | None) -> None:
    """Random answers of eight rows, of which tokens are drawn from what is left."""
    random = torch.Generator().manual_seed(3)
    processors, outweighed = reference(most), 0
    rules = [TimestampRules(info(most), END, VOCAB, SUPPRESSED, SUPPRESSED_FIRST) for _ in range(8)]
    tokens = torch.ones(8, BEGIN, dtype=torch.int64)
    for step in range(24):
        logits = torch.randn(8, VOCAB, generator=random) * 2
        logits[::2, NO_TIMESTAMPS + 1 :] -= 2.0  # so that text has a chance beside many timestamps
        expected = logits
        for processor in processors:
            expected = processor(tokens, expected)
        batch = batch_of(rules)
        found = left(weighed(logits, batch).masks)
        np.testing.assert_array_equal(found, (expected > -torch.inf).numpy(), err_msg=f"step {step}")
        outweighed += int((found.sum(1) < left(batch.masks).sum(1)).sum())
        chosen = torch.multinomial(expected.masked_fill(tokens[:, -1:] == END, 0.0).softmax(-1), 1, generator=random)
        chosen[chosen == END] = 8
        tokens = torch.cat([tokens, chosen], dim=1)
        for one, token in zip(rules, chosen[:, 0].tolist(), strict=True):
            one.accept(token)
    assert outweighed >= 5


@pytest.mark.parametrize("columns", [{"temperature": 0.0}, {"beam_width": 6, "num_draws": 0}], ids=["greedy", "beams"])
def test_the_sampler_heeds_them(columns: dict[str, Any]) -> None:
    random = torch.Generator().manual_seed(5)
    logits = torch.randn(4, VOCAB, generator=random) * 2
    rules = [TimestampRules(info(5), END, VOCAB, SUPPRESSED, SUPPRESSED_FIRST) for _ in range(4)]
    tokens = torch.ones(4, BEGIN, dtype=torch.int64)
    for token in (BEGIN + NO_TIMESTAMPS, 9):
        tokens = torch.cat([tokens, torch.full((4, 1), token)], dim=1)
        for one in rules:
            one.accept(token)
    expected = logits if "temperature" in columns else logits.log_softmax(-1)
    for processor in reference(5):
        expected = processor(tokens, expected)
    width = columns.get("beam_width", 1)
    result = sample(logits, weighed(logits, batch_of(rules, **columns)))
    best = expected.topk(width)
    np.testing.assert_array_equal(result.tokens[:, :width], best.indices.numpy())
    if width > 1:
        np.testing.assert_allclose(result.scores[:, :width], best.values.numpy(), rtol=1e-5)


def test_rows_without_such_rules_keep_their_masks() -> None:
    rules = [TimestampRules(info(5), END, VOCAB) for _ in range(2)]
    batch = batch_of(rules)
    plain = SamplingBatch(
        rows=batch.rows, table=batch.table, uniforms=batch.uniforms, masked=batch.masked, masks=batch.masks
    )
    assert weighed(torch.zeros(2, VOCAB), plain) is plain


def test_a_fork_goes_its_own_way() -> None:
    first = TimestampRules(info(None), END, VOCAB)
    first.accept(NO_TIMESTAMPS + 1)
    second = first.fork()
    second.accept(9)
    rows = np.zeros((2, mask_words(VOCAB)), dtype=np.uint32)
    first.fill(rows[0])
    second.fill(rows[1])
    may = left(rows)
    assert not may[0, NO_TIMESTAMPS + 1 :].any()
    assert may[1, NO_TIMESTAMPS + 2 :].all()


GOOD = {
    "no_timestamps_token_id": 50,
    "lang_to_id": {"<|en|>": 41, "<|de|>": 42},
    "task_to_id": {"transcribe": 45, "translate": 46},
    "prev_sot_token_id": 47,
    "max_initial_timestamp_index": 50,
}


def test_reading() -> None:
    assert read_speech({}, 100) is None
    assert read_speech(GOOD, 100) == SpeechInfo(
        no_timestamps_id=50,
        max_initial_timestamp=50,
        languages={"en": 41, "de": 42},
        tasks={"transcribe": 45, "translate": 46},
        prompt_id=47,
    )
    english = read_speech(GOOD | {"is_multilingual": False}, 100)
    assert english is not None
    assert (english.languages, english.tasks) == ({}, {})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"no_timestamps_token_id": 100}, ("no_timestamps_token_id", "100")),
        ({"no_timestamps_token_id": 99}, ("99", "no timestamps after")),
        ({"lang_to_id": {"<|en|>": "x"}}, ("lang_to_id", "'x'")),
        ({"lang_to_id": [41]}, ("lang_to_id", "[41]")),
        ({"max_initial_timestamp_index": -1}, ("max_initial_timestamp_index", "-1")),
        ({"prev_sot_token_id": True}, ("prev_sot_token_id", "True")),
    ],
)
def test_impossible_values_are_named(wrong: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read_speech(GOOD | wrong, 100)
    assert all(word in str(caught.value) for word in words)


def test_models_without_timestamps_refuse_them() -> None:
    with pytest.raises(InvalidRequestError, match="no_timestamps_token_id") as caught:
        timed(Decoding(max_tokens=1, eos_ids=frozenset({1})), None, 100)
    assert caught.value.param == "timestamps"
    for other in ({"allowed_token_ids": [1]}, {"constraint": {"catalogue": "x"}}):
        with pytest.raises(InvalidRequestError, match="cannot be used with timestamps"):
            SamplingParams(timestamps=True, **other)
