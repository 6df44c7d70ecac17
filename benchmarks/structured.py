"""The cost of structured output for a step on a CPU: 32 decoding rows with a JSON schema, and the same rows without.

The model is random, so what it would write makes no sense, and masks of nonsense are not those that a model meets. So
the answers are documents that were made before, in the tokens of a real vocabulary: each step fills the masks of the
grammar, sampling applies them, and the token of the document is what is left of them. Both kinds run in turns in one
engine; the median of their steps' times is given, and of the ratios round by round. Tokens that must come are not
appended here, so that each step has the same rows; how many steps that saves is told apart.

    python benchmarks/structured.py --rows 1 32 --json benchmarks/results/structured.json

The vocabulary is RoBERTa's (50,265 tokens, GPT-2's), from ../shared/data; without that folder nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from offline import ROOT, machine

from engine import LLM, SamplingParams, StructuredOutputsParams
from engine.interface.constraints import Constraint
from engine.interface.sampling_table import MaskRow, Masks
from engine.text.grammars import GrammarConstraint

VOCABULARY = ROOT.parent / "shared" / "data" / "tokenizers" / "roberta-base"
QUESTIONS = ROOT.parent / "shared" / "data" / "workloads" / "mt_bench"
SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
            "kind": {"enum": ["reader", "writer", "printer"]},
        },
        "required": ["name", "age", "tags", "kind"],
        "additionalProperties": False,
    },
}


def make_model(folder: Path, layers: int, hidden: int) -> Any:
    """A random Llama with the real tokenizer, which is returned."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(VOCABULARY)
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 256), max_position_embeddings=2048,
        bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return tokenizer


def document(rng: random.Random, words: Sequence[str]) -> str:
    """JSON of the schema: lines of real text as names, words as tags."""
    records = [
        {
            "name": " ".join(rng.sample(words, 3))[:30],
            "age": rng.randrange(131),
            "tags": [word[:12] for word in rng.sample(words, rng.randrange(5))],
            "kind": rng.choice(("reader", "writer", "printer")),
        }
        for _ in range(8)
    ]
    return json.dumps(records, separators=rng.choice(((", ", ": "), (",", ":"))))


class Scripted:
    """The constraint of a grammar whose answer was written before.

    Args:
        grammar: it allows each of the tokens.
        tokens: of the answer.
    """

    is_complete = False

    def __init__(self, grammar: GrammarConstraint, tokens: Sequence[int]):
        self.grammar, self._tokens, self._next = grammar, tokens, 0
        self.vocab_size = grammar.vocab_size

    def accept(self, token: int) -> None:
        """Both go on."""
        self.grammar.accept(token)
        self._next += 1

    def fill(self, mask_row: MaskRow) -> None:
        """As `fill_together`."""
        self.fill_together([self], [0], mask_row[None])

    @staticmethod
    def fill_together(constraints: Sequence[Constraint], places: Sequence[int], masks: Masks) -> None:
        """The grammars' masks, of which the next token is kept."""
        mine = [one for one in constraints if isinstance(one, Scripted)]
        GrammarConstraint.fill_together([one.grammar for one in mine], places, masks)
        for one, place in zip(mine, places, strict=True):
            word, bit = divmod(one._tokens[one._next], 32)
            allowed = int(masks[place, word]) >> bit & 1
            assert allowed, (one.grammar.problem, one._tokens[one._next])
            masks[place] = 0
            masks[place, word] = np.uint32(1 << bit)

    def fork(self) -> Scripted:
        """Before its first token."""
        return Scripted(self.grammar.fork(), self._tokens)


class Bench:
    """An engine, and the documents that it writes."""

    def __init__(self, folder: Path, tokenizer: Any, dtype: str, tokens: int):
        self.llm = LLM(str(folder), device="cpu", dtype=dtype, show_progress=False, enable_prefix_caching=False)
        self.llm.engine.scheduler.drafts_forced_tokens = False
        self._tokens, self._tokenizer = tokens, tokenizer
        self._asked = StructuredOutputsParams(json=SCHEMA)
        text = " ".join(path.read_text(encoding="utf-8") for path in sorted(QUESTIONS.glob("*.jsonl")))
        self._words = sorted({word for word in text.split() if word.isalpha()})
        grammars = self.llm.engine._grammars
        self._get, self._scripts = grammars.get, iter(())  # type: ignore[var-annotated]
        grammars.get = lambda params: Scripted(self._get(params), next(self._scripts))  # type: ignore[assignment]

    def steps(self, rows: int, temperature: float, seed: int | None) -> list[float]:
        """Seconds of each decoding step with all rows.

        Args:
            seed: of the documents; None for free answers.
        """
        rng = random.Random(seed)
        texts = [document(rng, self._words) for _ in range(rows)]
        scripts = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        self._scripts = iter(scripts)
        params = SamplingParams(
            max_tokens=min([self._tokens, *map(len, scripts)]), temperature=temperature, seed=1,
            ignore_eos=seed is None, structured_outputs=None if seed is None else self._asked,
        )  # fmt: skip
        engine = self.llm.engine
        for row in range(rows):
            engine.add_request(str(row), [5 + row, 6, 7], params)
        times = []
        while engine.has_unfinished_requests():
            began = time.perf_counter()
            deltas = engine.step_deltas()
            if len(deltas) == rows and not any(delta.finished for delta in deltas):
                times.append(time.perf_counter() - began)
        return times[2:]

    def measure(self, rows: int, rounds: int, temperature: float) -> dict[str, Any]:
        """Both kinds in turns, with other documents each round."""
        plain, constrained, ratios = [], [], []
        for turn in range(rounds + 1):
            steps, other = self.steps(rows, temperature, turn), self.steps(rows, temperature, None)
            if turn:  # the first one compiles
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
            "microseconds_a_row": round(1e6 * (statistics.median(constrained) - statistics.median(plain)) / rows, 1),
        }

    def saved(self, tokens: int) -> dict[str, int]:
        """Steps of one compact answer, with tokens that must come appended and without."""
        self.llm.engine._grammars.get = self._get  # type: ignore[method-assign]
        asked, found = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True), {}
        for appended in (False, True):
            self.llm.engine.scheduler.drafts_forced_tokens = appended
            before = self.llm.stats().num_steps
            self.llm.generate([[5, 6, 7]], SamplingParams(max_tokens=tokens, temperature=0, structured_outputs=asked))
            found["appended" if appended else "each_sampled"] = self.llm.stats().num_steps - before
        return found


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not VOCABULARY.exists() or not QUESTIONS.exists():
        print(f"{VOCABULARY} and {QUESTIONS} are needed.")
        sys.exit(0)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_model(Path(folder), options.layers, options.hidden)
        bench = Bench(Path(folder), tokenizer, options.dtype, options.tokens)
        results = []
        for rows in options.rows:
            for temperature in (0.0, 0.8):
                results.append(bench.measure(rows, options.rounds, temperature))
                print(results[-1], flush=True)
        figures = {
            "machine": machine(),
            "model": f"Llama, {options.layers} layers of {options.hidden}, vocabulary {len(tokenizer)}",
            "dtype": bench.llm.engine.info.dtype,
            "steps": results,
            "steps_of_an_answer": bench.saved(200),
        }
        bench.llm.close()
    print(json.dumps(figures, indent=2))
    if options.json is not None:
        (ROOT / options.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
