"""Speech to text on a CPU: `LLM.generate` over all windows of one file against `transformers`' `generate`, on one
random checkpoint in one run.

The checkpoint has Whisper's shape (tiny or base). The file is cut into windows as `LLM.transcribe` does it, and every
window is answered with the same number of tokens, the end token being suppressed: so each peer does the same work.
Features are part of it. Peers:

    octavo             all windows at once
    one by one         `generate` for one window after the other, as its own way through a long file goes
    batched            `generate` for batches of windows

Rounds alternate between the peers, and ratios are taken round by round. Answers are compared, too: as far as the
reference decides clearly they are the same.

    python benchmarks/speech.py
    python benchmarks/speech.py --shape base --minutes 10 --rounds 3 --output
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from offline import ROOT, machine

from engine import LLM, AudioInput, SamplingParams
from engine.audio import Cutter, load_log_mel

SHAPES = {"tiny": (384, 4, 6), "base": (512, 6, 8)}
RATE, VOCAB, END, START, NO_TIMESTAMPS = 16_000, 51_865, 50_257, 50_258, 50_363
BEGIN = [START, 50_259, 50_359, NO_TIMESTAMPS]  # of a transcription in English
BATCH = 8
PEERS = ["one by one", "batched"]


def make_checkpoint(shape: str, folder: Path) -> Any:
    """A random model of that shape, saved; returns the reference."""
    width, layers, heads = SHAPES[shape]
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width, eos_token_id=END,
        bos_token_id=END, pad_token_id=END, decoder_start_token_id=START, init_std=0.05,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=END, pad_token_id=END, bos_token_id=END, decoder_start_token_id=START, suppress_tokens=[END]
    )
    model.generation_config.no_timestamps_token_id = NO_TIMESTAMPS
    model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor().save_pretrained(folder)
    return model


def make_sound(minutes: float) -> np.ndarray:
    """Tones that come and go, with pauses."""
    random = np.random.default_rng(0)
    parts: list[np.ndarray] = []
    while sum(map(len, parts)) < minutes * 60 * RATE:
        clock = np.arange(random.integers(RATE // 5, 2 * RATE)) / RATE
        tones = sum(np.sin(2 * np.pi * tone * clock) for tone in random.uniform(100, 3000, 4))
        parts += [tones * random.uniform(0.02, 0.2), np.zeros(random.integers(RATE // 20, RATE // 2))]
    sound = np.concatenate(parts)[: int(minutes * 60 * RATE)]
    return (sound + 0.002 * random.standard_normal(len(sound))).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=96, help="of each window's answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS, help="of transformers' ways")
    parser.add_argument("--output", action="store_true", help="write benchmarks/results/speech-SHAPE.json")
    given = parser.parse_args()
    sound = make_sound(given.minutes)
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(given.shape, Path(folder))
        extractor, log_mel = transformers.WhisperFeatureExtractor(), load_log_mel(Path(folder))
        cutter = Cutter(log_mel.window_samples, RATE)
        windows = [window.samples for window in (*cutter.add(sound), *cutter.end())]
        llm = LLM(folder, device="cpu", dtype="float32", skip_tokenizer_init=True, show_progress=False)
        params = SamplingParams(max_tokens=given.tokens, temperature=0.0, suppress_tokens=[END])

        def octavo() -> list[list[int]]:
            inputs = [AudioInput(features, BEGIN) for features in log_mel.features_of_all(windows)]
            outputs = llm.generate(inputs, params, use_tqdm=False)
            llm.engine.reset_prefix_cache()  # the next round encodes again
            return [output.outputs[0].token_ids for output in outputs]

        def reference(size: int) -> list[list[int]]:
            found: list[list[int]] = []
            for at in range(0, len(windows), size):
                batch = windows[at : at + size]
                features = extractor(batch, sampling_rate=RATE, return_tensors="pt").input_features
                begin = torch.tensor([BEGIN] * len(batch))
                with torch.inference_mode():
                    written = model.generate(
                        features, decoder_input_ids=begin, max_new_tokens=given.tokens, do_sample=False,
                        force_unique_generate_call=True,
                    )  # fmt: skip
                found += [row[-given.tokens :] for row in written.tolist()]
            return found

        peers: dict[str, Callable[[], list[list[int]]]] = {
            "octavo": octavo,
            "one by one": lambda: reference(1),
            "batched": lambda: reference(BATCH),
        }
        peers = {name: run for name, run in peers.items() if name == "octavo" or name in given.peers}
        seconds: dict[str, list[float]] = {name: [] for name in peers}
        answers: dict[str, list[list[int]]] = {}
        loads = [os.getloadavg()[0]]
        llm.generate([AudioInput(log_mel.features(windows[0]), BEGIN)], SamplingParams(max_tokens=4), use_tqdm=False)
        for _ in range(given.rounds):
            for name, run in peers.items():
                began = time.perf_counter()
                answers[name] = run()
                seconds[name].append(time.perf_counter() - began)
                print(f"{name}: {seconds[name][-1]:.1f} s, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
                loads.append(os.getloadavg()[0])
        llm.close()
    same = {
        name: sum(a == b for a, b in zip(answers["octavo"], answers[name], strict=True)) for name in list(peers)[1:]
    }
    ratios = {
        name: [theirs / ours for theirs, ours in zip(seconds[name], seconds["octavo"], strict=True)]
        for name in list(peers)[1:]
    }
    result = {
        "machine": machine(),
        "shape": given.shape, "minutes": given.minutes, "windows": len(windows), "tokens": given.tokens,
        "seconds": seconds,
        "ratios": {name: statistics.median(found) for name, found in ratios.items()},
        "equal_answers": same,
        "load_average": [min(loads), max(loads)],
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    if given.output:
        path = ROOT / "benchmarks" / "results" / f"speech-{given.shape}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
