"""What structured output costs a step on a CPU: 32 decoding rows with a JSON schema, and the same rows without.

The model is random, with a vocabulary of random words; its answers make no sense, but are JSON. Both kinds run in turns
in one engine; the median of their steps' times is given, and of the ratios round by round. Tokens that must come are
not appended here, so that each step has the same rows; how many steps that saves is told apart.

    python benchmarks/structured.py --rows 1 32 --vocabulary 49152 --json benchmarks/results/structured.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from offline import ROOT, machine
from tokenizers import decoders, models, pre_tokenizers

from engine import LLM, SamplingParams, StructuredOutputsParams

SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
            "kind": {"enum": ["reader", "writer", "printer"]},
        },
        "required": ["name", "age", "tags", "kind"],
        "additionalProperties": False,
    },
}


def make_model(folder: Path, vocabulary: int, layers: int, hidden: int) -> None:
    """A random Llama and a tokenizer of random words, of which most begin with a space."""
    rng = random.Random(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"</s>": 0} | {letter: number for number, letter in enumerate(alphabet, start=1)}
    marks = '{}[]",:.-_()'
    while len(vocab) < vocabulary:
        kind = rng.random()
        letters = "".join(rng.choices("etaoinshrdlucmfwypvbgkqjxz", weights=range(26, 0, -1), k=rng.randint(2, 10)))
        word = "".join(rng.choices(marks, k=rng.randint(2, 4))) if kind < 0.05 else letters
        word = "".join(rng.choices("0123456789", k=rng.randint(2, 3))) if kind > 0.98 else word
        vocab.setdefault(("Ġ" if 0.3 < kind < 0.98 else "") + word, len(vocab))
    model = tokenizers.Tokenizer(models.BPE(vocab, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>").save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 256), max_position_embeddings=2048,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def steps_of(
    llm: LLM, rows: int, tokens: int, asked: StructuredOutputsParams | None, temperature: float
) -> list[float]:
    """Seconds of each decoding step with all rows."""
    params = SamplingParams(
        max_tokens=tokens, temperature=temperature, seed=1, ignore_eos=asked is None, structured_outputs=asked
    )
    for row in range(rows):
        llm.engine.add_request(str(row), [5 + row, 6, 7], params)
    times, engine = [], llm.engine
    while engine.has_unfinished_requests():
        began = time.perf_counter()
        deltas = engine.step_deltas()
        if len(deltas) == rows and not any(delta.finished for delta in deltas):
            times.append(time.perf_counter() - began)
    return times[2:]


def measure(llm: LLM, rows: int, tokens: int, rounds: int, temperature: float) -> dict[str, Any]:
    """Both kinds in turns."""
    asked = StructuredOutputsParams(json=SCHEMA)
    plain, constrained, ratios = [], [], []
    for _ in range(rounds):
        for _ in range(2):  # the first compiles, and meets the states
            steps = steps_of(llm, rows, tokens, asked, temperature)
        other = steps_of(llm, rows, tokens, None, temperature)
        plain += other
        constrained += steps
        ratios.append(statistics.median(steps) / statistics.median(other))
    return {
        "rows": rows,
        "temperature": temperature,
        "plain_ms": round(1e3 * statistics.median(plain), 3),
        "constrained_ms": round(1e3 * statistics.median(constrained), 3),
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def saved(llm: LLM, tokens: int) -> dict[str, int]:
    """Steps of one compact answer, with tokens that must come appended and without."""
    asked, found = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True), {}
    for appended in (False, True):
        llm.engine.scheduler.drafts_forced_tokens = appended
        before = llm.stats().num_steps
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=tokens, temperature=0, structured_outputs=asked))
        found["appended" if appended else "each_sampled"] = llm.stats().num_steps - before
    llm.engine.scheduler.drafts_forced_tokens = False
    return found


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), options.vocabulary, options.layers, options.hidden)
        llm = LLM(folder, device="cpu", dtype=options.dtype, show_progress=False, enable_prefix_caching=False)
        llm.engine.scheduler.drafts_forced_tokens = False
        began = time.perf_counter()
        llm.generate([[5]], SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(regex="a")))
        first = time.perf_counter() - began
        results = []
        for rows in options.rows:
            for temperature in (0.0, 0.8):
                results.append(measure(llm, rows, options.tokens, options.rounds, temperature))
                print(results[-1], flush=True)
        figures = {
            "machine": machine(),
            "model": f"Llama, {options.layers} layers of {options.hidden}, vocabulary {options.vocabulary}",
            "dtype": llm.engine.info.dtype,
            "first_request_seconds": round(first, 2),
            "steps": results,
            "steps_of_an_answer": saved(llm, 200),
        }
        llm.close()
    print(json.dumps(figures, indent=2))
    if options.json is not None:
        (ROOT / options.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
