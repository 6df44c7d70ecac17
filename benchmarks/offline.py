"""Throughput of `LLM.generate` against `transformers`' `generate`, on one random checkpoint in one run.

The model has the shape of SmolLM2-135M (30 layers, hidden 576, 9 heads, 3 KV heads, FFN 1536,
vocabulary 49152, tied). Requests are mixed: prompts of 32 to 256 tokens, answers of 32 to 128. Both sides
decode greedily and count only the tokens that each request asked for: the peer, whose batch is
padded, runs until its longest answer is done. Rounds alternate between the two, and the ratio is taken
round by round.

    python benchmarks/offline.py --requests 8 32 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engine import LLM, SamplingParams  # noqa: E402

SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
PROMPT = (32, 256)
ANSWER = (32, 128)


def machine() -> dict[str, Any]:
    """The machine of the measurement."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.stdout.strip() or None,
        "date": date.today().isoformat(),
    }


def make_checkpoint(folder: Path, dtype: torch.dtype) -> None:
    """Save the random model."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE)
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)


def make_requests(count: int) -> tuple[list[list[int]], list[int]]:
    """Prompts, and how many tokens each wants."""
    rng = random.Random(count)
    prompts = [[rng.randrange(SHAPE["vocab_size"]) for _ in range(rng.randint(*PROMPT))] for _ in range(count)]
    return prompts, [rng.randint(*ANSWER) for _ in range(count)]


def run_ours(llm: LLM, prompts: list[list[int]], wanted: list[int]) -> float:
    """Seconds for all requests."""
    params = [SamplingParams(temperature=0.0, max_tokens=tokens, num_beams=1, ignore_eos=True) for tokens in wanted]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    if [len(output.outputs[0].token_ids) for output in outputs] != wanted:
        raise RuntimeError("an answer does not have the length that was asked for")
    return seconds


def run_peer(model: Any, prompts: list[list[int]], wanted: list[int]) -> float:
    """Seconds for all requests in one left-padded batch."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    new = max(wanted)
    ids, mask = ids.to(model.device), mask.to(model.device)
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, min_new_tokens=new, max_new_tokens=new, pad_token_id=0
        )
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file (default: benchmarks/results/offline-DTYPE.json)")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), dtype)
        llm = LLM(folder, dtype=options.dtype, skip_tokenizer_init=True, enable_prefix_caching=False)
        device = llm.engine.info.device
        peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
        for count in options.requests:
            prompts, wanted = make_requests(count)
            warm_prompts, warm_wanted = make_requests(2)
            run_ours(llm, warm_prompts, [8] * len(warm_wanted))
            run_peer(peer, warm_prompts, [8] * len(warm_wanted))
            ours, theirs = [], []
            for _ in range(options.rounds):
                ours.append(sum(wanted) / run_ours(llm, prompts, wanted))
                theirs.append(sum(wanted) / run_peer(peer, prompts, wanted))
            row = {
                "requests": count,
                "output_tokens": sum(wanted),
                "octavo_tokens_per_second": round(statistics.median(ours), 1),
                "transformers_tokens_per_second": round(statistics.median(theirs), 1),
                "ratio": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 2),
                "rounds": {"octavo": [round(x, 1) for x in ours], "transformers": [round(x, 1) for x in theirs]},
            }
            rows.append(row)
            print(
                f"{count:4d} requests: octavo {row['octavo_tokens_per_second']} tok/s, "
                f"transformers {row['transformers_tokens_per_second']} tok/s, ratio {row['ratio']}",
                flush=True,
            )
        llm.close()
    result = {"benchmark": "offline", "dtype": options.dtype, "device": device, "machine": machine(), "results": rows}
    output = options.output or ROOT / "benchmarks" / "results" / f"offline-{options.dtype}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {output}")


if __name__ == "__main__":
    main()
