"""CTranslate2 in a process of its own, for `encoder_decoder.py`: its threads and torch's are not to meet.

    python ctranslate2_worker.py convert CHECKPOINT FOLDER
    python ctranslate2_worker.py serve FOLDER

`serve` answers each line of JSON on its input with one on its output. A line either loads the model
({"load": {keywords of `Translator`}}) or translates ({"inputs": lists of tokens, "options": {keywords of
`translate_batch`}}); the answer to that has the seconds it took, the tokens and the scores.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import ctranslate2


def convert(checkpoint: str, folder: str) -> None:
    """A checkpoint of `transformers` in CTranslate2's format, float32."""
    ctranslate2.converters.TransformersConverter(checkpoint).convert(folder)


def serve(folder: str) -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    translator: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        if "load" in order:
            translator = None  # the old one's threads end first
            translator = ctranslate2.Translator(folder, device="cpu", **order["load"])
            answer: dict[str, Any] = {
                "version": ctranslate2.__version__,
                "compute_types": sorted(ctranslate2.get_supported_compute_types("cpu")),
            }
        else:
            started = time.perf_counter()
            results = translator.translate_batch(order["inputs"], return_scores=True, **order["options"])
            answer = {
                "seconds": time.perf_counter() - started,
                "tokens": [result.hypotheses[0] for result in results],
                "scores": [result.scores[0] if result.scores else None for result in results],
            }
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    {"convert": convert, "serve": serve}[sys.argv[1]](*sys.argv[2:])
