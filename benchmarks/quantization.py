"""What weights of few bits cost in accuracy, on text that the trained model stories260k wrote itself.

Teacher-forced on stories told in float32, greedy and drawn at temperature 1: at how many positions the most likely
token is float32's, how far logits lie apart, and the perplexity of the text. `int4, head int4` is what
`--quantization int4` would be if the vocabulary's matrix, which has 8 bits, had 4 as well.

    python benchmarks/quantization.py
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kv_cache_dtype import TRAINED, tell_stories
from offline import ROOT, machine
from torch import Tensor

from engine import LLM, SamplingParams
from engine.backends import native
from engine.model.experts import ExpertMatrices
from engine.model.layers import Linear
from engine.model.transformer import Transformer

CASES = ("float32", "bfloat16", "int8", "int4", "int4, head int4")


@contextmanager
def head_like_the_rest() -> Iterator[None]:
    """Every matrix gets what was asked for, the vocabulary's as well."""

    def matrices(self: Transformer, quantization: Any) -> Iterator[tuple[Linear | ExpertMatrices, Any]]:
        yield from ((m, quantization) for m in self.modules() if isinstance(m, Linear | ExpertMatrices))

    with mock.patch.object(Transformer, "matrices", matrices):
        yield


def open_model(case: str) -> LLM:
    """The trained model as a case has it."""
    kind, _, head = case.partition(", ")
    settings: dict[str, Any] = {"dtype": "bfloat16" if kind == "bfloat16" else "float32"}
    if kind.startswith("int"):
        settings["quantization"] = kind
    settings |= {
        "device": "cpu",
        "max_step_time": 0,
        "show_progress": False,
        "kv_cache_dtype": "float32",
        "kv_cache_memory": "64MiB",
    }
    if not head:
        return LLM(str(TRAINED), **settings)
    with head_like_the_rest():
        return LLM(str(TRAINED), **settings)


def logits_of(case: str, texts: list[list[int]]) -> list[Tensor]:
    """Logits [tokens - 1, vocabulary] of the texts, as a step computes them."""
    llm = open_model(case)
    made: list[Tensor] = []
    plain = Transformer.logits

    def logits(self: Transformer, hidden: Tensor) -> Tensor:
        found = plain(self, hidden)
        made.append(found.clone())
        return found

    found = []
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with mock.patch.object(Transformer, "logits", logits):
        for text in texts:
            made.clear()
            llm.generate([text], params, use_tqdm=False)
            found.append(torch.cat(made[1:])[: len(text) - 1])  # those of the token that follows come first
    llm.close()
    return found


def compare(ours: list[Tensor], exact: list[Tensor], texts: list[list[int]]) -> dict[str, Any]:
    """How logits differ from float32's."""
    a, b = torch.cat(ours).double(), torch.cat(exact).double()
    tokens = torch.tensor([token for text in texts for token in text[1:]])
    logprobs = a.log_softmax(1).gather(1, tokens[:, None])
    return {
        "positions": len(a),
        "top1_agreement": round(float((a.argmax(1) == b.argmax(1)).double().mean()), 5),
        "max_logit_error": round(float((a - b).abs().max()), 4),
        "rms_logit_error": round(float((a - b).square().mean().sqrt()), 4),
        "perplexity": round(math.exp(-float(logprobs.mean())), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stories", type=int, default=16, help="of each kind")
    parser.add_argument("--length", type=int, default=255, help="tokens of a story")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "quantization.json")
    options = parser.parse_args()
    if not TRAINED.is_dir():
        parser.error(f"there is no trained model at {TRAINED}")
    stories = tell_stories(options.stories, options.length)
    rows = []
    for name, texts in stories.items():
        exact = logits_of("float32", texts)
        for case in CASES:
            row = {"text": name, "weights": case, **compare(logits_of(case, texts), exact, texts)}
            print(row, flush=True)
            rows.append(row)
    library = native.current()
    result = {
        "benchmark": "quantization",
        "machine": machine(),
        "kernels": None if library is None else library.isa,
        "results": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
