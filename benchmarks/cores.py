"""How a CPU's speed grows with the number of threads: decoding and prompts of one random model, a process for each.

The model has the shape of Qwen2.5-1.5B in bfloat16. Each process loads it, decodes 1 and 8 rows and computes a prompt,
`--rounds` times; the fastest round counts, because other programs only make rounds slower. Bandwidth is the bytes of
the weights that a decoding step reads, over its time.

    python benchmarks/cores.py --threads 1 2 4 8 16 --output cores.json
    python benchmarks/cores.py --tiny                                     # shows that it works
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

SHAPE: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
TINY: dict[str, Any] = SHAPE | {
    "vocab_size": 512, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2,
}  # fmt: skip
DECODED = 32


def make(folder: Path, shape: dict[str, Any]) -> None:
    """Save the random model."""
    import torch
    import transformers

    config = transformers.Qwen2Config(**shape)
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.02, generator=generator)
    model.save_pretrained(folder)


def measure(folder: Path, quantization: str, prompt: int, rounds: int) -> dict[str, float]:
    """Tokens per second, and the gigabytes per second of one row's weights."""
    from engine import LLM, SamplingParams

    llm = LLM(
        str(folder), device="cpu", dtype="bfloat16", quantization=quantization, show_progress=False,
        skip_tokenizer_init=True, max_model_len=2048, kv_cache_memory=1 << 29, enable_prefix_caching=False,
    )  # fmt: skip
    vocabulary = llm.engine.info.vocab_size

    def seconds(rows: int, length: int, tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        prompts = [{"prompt_token_ids": [(7 * i + row) % vocabulary for i in range(length)]} for row in range(rows)]
        best = float("inf")
        for _ in range(rounds):
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            best = min(best, time.perf_counter() - started)
        return best

    steps = {rows: (seconds(rows, 8, DECODED + 1) - seconds(rows, 8, 1)) / DECODED for rows in (1, 8)}
    weights = sum(one.stat().st_size for one in folder.glob("*.safetensors"))
    share = {"none": 1.0, "int8": 8.25 / 16, "int4": 5 / 16}[quantization]
    result = {f"decode {rows}": rows / time_of for rows, time_of in steps.items()}
    result |= {"prompt": prompt / seconds(1, prompt, 1), "GB/s of one row": weights * share / steps[1] / 1e9}
    llm.close()
    return {name: round(value, 2) for name, value in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, os.cpu_count() or 1])
    parser.add_argument("--quantization", choices=["none", "int8", "int4"], default="none")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(measure(options.child, options.quantization, options.prompt, options.rounds)))
        return
    from offline import machine

    found: dict[str, Any] = {"machine": machine(), "quantization": options.quantization, "rows": {}}
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), TINY if options.tiny else SHAPE)
        for threads in options.threads:
            command = [sys.executable, __file__, "--child", folder, "--quantization", options.quantization]
            command += ["--prompt", str(options.prompt), "--rounds", str(options.rounds)]
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found["rows"][str(threads)] = json.loads(done.stdout.splitlines()[-1])
            print(f"{threads:3} threads: {found['rows'][str(threads)]}", flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
