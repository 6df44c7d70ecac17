"""Answers from a list, ranked by a model: the members that answer an input best, and how probable each is.

    python examples/catalogue.py

The bundled encoder-decoder translates a small invented language; here it has to answer with one of 240 sentences. No
server is needed. With one it is `octavo serve --demo seq2seq --catalogue sentences=sentences.jsonl`, and in the request
`"constraint": {"catalogue": "sentences"}`.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

from octavo import LLM, SamplingParams
from octavo.server.config.settings import DEMOS

BEGINNINGS = ("Later", "After a while", "After some time", "After that", "Now")
WHO = ("fox", "bear", "teacher", "tutor")
DID = ("found", "saw", "lost")
THINGS = ("book", "boat", "ship", "bell")


def main() -> None:
    sentences = [
        f"{beginning} the {who} {did} the {thing}."
        for beginning in BEGINNINGS
        for who in WHO
        for did in DID
        for thing in THINGS
    ]
    with tempfile.TemporaryDirectory() as folder:
        catalogue = Path(folder) / "sentences.jsonl"
        catalogue.write_text("".join(json.dumps(sentence) + "\n" for sentence in sentences))
        llm = LLM(str(DEMOS["seq2seq"]), catalogue=[f"sentences={catalogue}"], show_progress=False)

    # With length_penalty 0 a score is the log-probability of the whole answer.
    params = SamplingParams(constraint={"catalogue": "sentences"}, num_beams=64, n=5, length_penalty=0.0)
    inputs = ["luma li vulpa li libran trovet.", "nun li doka li navan videt."]
    for text, output in zip(inputs, llm.generate(inputs, params, use_tqdm=False), strict=True):
        print(f"--- {text}: the best 5 of {len(sentences)} sentences")
        for answer in output.outputs:
            assert answer.score is not None
            print(f"{math.exp(answer.score):7.2%}  {answer.text}")
    llm.close()


if __name__ == "__main__":
    main()
