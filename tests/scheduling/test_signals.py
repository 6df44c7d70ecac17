"""Inputs that are no token ids: how they lie in a plan, and what tells encoder inputs apart."""

from __future__ import annotations

import numpy as np

from engine.interface.pooling import Pooling
from engine.interface.request import Decoding, Request
from engine.scheduling.batch import build_plan
from engine.scheduling.block_pool import PageHasher
from engine.scheduling.encoder_input import EncoderInput
from engine.scheduling.row import Row
from engine.scheduling.sequence import SequenceGroup


def test_a_plan_has_the_signals_of_its_rows() -> None:
    """In the order of the rows, beside tokens; none where all are tokens."""
    signals = [np.full((2, 3), number, dtype=np.float32) for number in range(2)]
    rows = []
    for number, signal in enumerate((signals[0], None, signals[1])):
        request = Request(
            request_id=str(number),
            prompt_token_ids=(0,) * 4 if signal is not None else (7, 8, 9),
            decoding=Decoding(max_tokens=1),
            pooling=Pooling(task="embed"),
            signal=signal,
        )
        group = SequenceGroup(request, number, b"", unchunked=True)
        rows.append(Row(group, group.sequences[0], 0, group.sequences[0].num_tokens, 0))
    plan = build_plan(rows, [], 1)
    assert plan.signals == (signals[0], None, signals[1])
    assert plan.query_start.tolist() == [0, 4, 7, 11]
    assert build_plan(rows[1:2], [], 1).signals == ()

    images = plan.of_rows([0, 2])
    assert images.signals == (signals[0], signals[1])
    assert images.query_start.tolist() == [0, 4, 8]
    assert images.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [(wanted.row, wanted.complete) for wanted in images.pooling] == [(0, True), (1, True)]
    texts = plan.of_rows([1])
    assert texts.token_ids.tolist() == [7, 8, 9]
    assert [wanted.row for wanted in texts.pooling] == [0]
    assert texts.context_lens.tolist() == [3]


def test_equal_signals_are_encoded_once() -> None:
    """An encoder input's key follows from its bytes: another signal of the same length has another."""
    hasher = PageHasher(b"key")
    first = np.arange(6, dtype=np.float32).reshape(2, 3)
    keys = [
        EncoderInput((0,) * 4, b"root", hasher, 2, signal).key
        for signal in (first, first.copy(), first.T.copy().T, first + 1, None)
    ]
    assert keys[0] == keys[1] == keys[2]
    assert len(set(keys)) == 3
