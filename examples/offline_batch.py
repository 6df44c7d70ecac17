"""A batch without a server: many prompts, one call, all in the same steps; each with settings of its own.

    python examples/offline_batch.py [MODEL]

MODEL is a folder or a hub id; without it the bundled model.
"""

from __future__ import annotations

import sys
import time

from octavo import LLM, SamplingParams
from octavo.server.config.settings import DEMO_MODEL

NAMES = ("Ada", "Bruno", "Clara", "Dario", "Elif", "Farid", "Greta", "Hana")


def main() -> None:
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else str(DEMO_MODEL), show_progress=False)
    prompts = [f"Long ago there was a fox named {name} who" for name in NAMES]

    # The same settings for all; or one object per prompt, here with a seed each.
    params = [SamplingParams(temperature=0.8, top_p=0.95, max_tokens=40, seed=seed) for seed in range(len(prompts))]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"{prompt}{output.outputs[0].text}")
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"({tokens} tokens of {len(outputs)} answers in {seconds:.2f} s)")

    # Beam search in the same batch machinery: the best two of four beams, with their scores.
    (output,) = llm.generate("In the forest", SamplingParams(num_beams=4, n=2, max_tokens=16))
    for answer in output.outputs:
        print(f"{answer.cumulative_logprob:8.3f}  In the forest{answer.text}")
    llm.close()


if __name__ == "__main__":
    main()
