"""What `make test` takes of the matrices over all families; `make test-all` takes all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

# Together they use each part of a decoder, of an encoder and its heads, and of an encoder-decoder.
EVERYDAY = frozenset(
    {
        "apertus", "bloom-odd-heads-untied", "cohere2", "dbrx", "deepseek-v3", "falcon-alibi", "gemma3", "gemma3n",
        "gemma4-experts-keys-as-values", "falcon-h1", "glm4-moe", "laguna", "nemotron-h",
        "gpt2", "gpt-neo", "gpt-oss", "lfm2", "llama", "llama4", "mistral", "olmo2", "opt-norms-after-projected",
        "phi3-factors-by-request", "qwen2-moe", "qwen3-moe", "qwen3-next", "qwen3.5-odd-tied",
        "stablelm-parallel-biases-tied",
        "albert", "bert", "bert-answers", "bert-classes", "bert-masked", "bert-tokens", "big-bird", "big-bird-answers",
        "convbert", "deberta-1", "deberta-v3", "distilbert", "fnet", "gte-0", "jina-v2", "layoutlm", "longformer",
        "mobilebert", "modernbert", "roberta", "t5-encoder",
        "bart", "led", "longt5-sums", "m2m100", "marian", "pegasus", "pegasus-x", "prophetnet",
        "switch-experts", "t5", "t5-own-head-scaled",
    }
)  # fmt: skip


def everyday(names: Iterable[str]) -> list[Any]:
    """The names as parameters of tests: those that are not for every day are slow."""
    return [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow) for name in names]
