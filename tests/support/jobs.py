"""Requests of every kind, for tests that run them in different circumstances."""

from __future__ import annotations

from typing import Any

from engine import SamplingParams
from support.checkpoints import SHAPES, random_prompt
from support.driving import Job

CHECKPOINT = "llama-grouped"
VOCAB = SHAPES[CHECKPOINT].vocab


def greedy(length: int = 20, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=length, **({"ignore_eos": True} | more))


def sampled(seed: int, length: int = 20, **more: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "ignore_eos": True} | more), seed=seed, max_tokens=length)


def beams(count: int, length: int = 16, **more: Any) -> SamplingParams:
    return SamplingParams(num_beams=count, n=count, max_tokens=length, **more)


def prompt(seed: int, length: int) -> list[int]:
    return random_prompt(VOCAB, seed, length)


MIXED = [
    Job(prompt(1, 19), greedy()),
    Job(prompt(2, 3), sampled(5)),
    Job(prompt(3, 41), sampled(6, temperature=1.3, top_k=30)),
    Job(prompt(4, 8), sampled(7, top_p=0.8, n=3)),
    Job(prompt(5, 12), sampled(8, min_p=0.03, presence_penalty=0.4)),
    Job(prompt(6, 27), sampled(9, repetition_penalty=1.3, frequency_penalty=0.3, n=2)),
    Job(prompt(7, 22), beams(4)),
    Job(prompt(8, 5), beams(3, length_penalty=0.6, early_stopping=True)),
    Job(prompt(9, 33), beams(2, length_penalty=2.0, early_stopping="never", ignore_eos=True)),
    Job(prompt(10, 15), greedy(ignore_eos=False)),
    Job(prompt(11, 30), greedy(no_repeat_ngram_size=2, min_tokens=5, logit_bias={3: 2.0})),
]
