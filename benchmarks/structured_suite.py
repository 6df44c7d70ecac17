"""The official tests of JSON Schema against structured output: what is allowed must be valid.

    python3 -m benchmarks.structured_suite FOLDER

FOLDER is `tests/draft2020-12` of JSON-Schema-Test-Suite, which the source package of `jsonschema` holds as `json/`. For
each schema: is it refused, and for which keyword? Each text of its tests is given to the grammar byte by byte: which
invalid ones are allowed (there must be none), which valid ones are not? Then answers are drawn at random through the
masks, and judged by `jsonschema-rs`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema_rs
import llguidance
import numpy as np

from engine import InvalidRequestError
from engine.interface.structured import StructuredOutputsParams
from engine.text.grammars import Trial, grammar_text, limits_of, single_bytes

WALKS = 8  # answers drawn for each schema
LONGEST = 400  # bytes of one


@dataclass(slots=True)
class Found:
    """The results of all schemas.

    Attributes:
        refused: by keyword, or by the beginning of the message.
        wrong: invalid answers that were allowed, as file, description and text.
        lost: valid texts that are not allowed, by file.
        drawn, unfinished: answers that were drawn, and such that did not end in time.
        too_large: drawn ones with a number that float64 cannot hold.
    """

    schemas: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    invalid: int = 0
    valid: int = 0
    wrong: list[tuple[str, str, str]] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    drawn: int = 0
    unfinished: int = 0
    too_large: int = 0


def matcher_of(text: str, tokens: Any) -> Any:
    """A grammar's first state."""
    return llguidance.LLMatcher(
        tokens, text, limits=limits_of(llguidance, StructuredOutputsParams(json_object=True)), log_level=0
    )


def allows(text: str, tokens: Any, answer: str) -> bool:
    """Whether a text is an answer."""
    matcher, data = matcher_of(text, tokens), list(answer.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting() and not matcher.is_error()


def draw(text: str, tokens: Any, rng: random.Random) -> str | None:
    """An answer drawn through the masks; None where it did not end."""
    matcher, answer = matcher_of(text, tokens), bytearray()
    while len(answer) < LONGEST:
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        if matcher.is_error():
            return None
        choices = np.flatnonzero(mask[:256]).tolist()
        if not choices or (matcher.is_accepting() and rng.random() < 0.2):
            return answer.decode() if matcher.is_accepting() else None
        # What ends strings, lists and objects comes more often than at random, so that answers end.
        ending = [byte for byte in choices if byte in b'"]},:0123456789']
        plain = [byte for byte in choices if 32 < byte < 127]
        byte = rng.choice(ending if ending and rng.random() < 0.6 else plain or choices)
        matcher.consume_token(byte)
        answer.append(byte)
    return None


def examine(path: Path, found: Found, tokens: Any, trial: Trial) -> None:
    """All groups of a file."""
    for group in json.loads(path.read_text(encoding="utf-8")):
        schema, found.schemas = group["schema"], found.schemas + 1
        try:
            params = StructuredOutputsParams(json=schema)
            trial.check(params)
        except InvalidRequestError as problem:
            message = str(problem)
            place = message.partition('(keyword "')[2].partition('"')[0]
            found.refused[place or message.partition(": ")[2][:60]] += 1
            continue
        text = grammar_text(params)
        for test in group["tests"]:
            answer = json.dumps(test["data"], ensure_ascii=False)
            allowed = allows(text, tokens, answer)
            if test["valid"]:
                found.valid += 1
                found.lost[path.name] += not allowed
            else:
                found.invalid += 1
                if allowed:
                    found.wrong.append((path.name, f"{group['description']}: {test['description']}", answer))
        validator, rng = jsonschema_rs.validator_for(schema, validate_formats=True), random.Random(found.schemas)
        for _ in range(WALKS):
            drawn = draw(text, tokens, rng)
            found.drawn += drawn is not None
            found.unfinished += drawn is None
            if drawn is not None and "Infinity" in json.dumps(value := json.loads(drawn)):
                found.too_large += 1  # as in 1e999: JSON, but no validator can read it
            elif drawn is not None and not validator.is_valid(value):
                found.wrong.append((path.name, f"{group['description']}: drawn", drawn))


def main() -> None:
    """Run all files of the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    found, trial, tokens = Found(), Trial(), single_bytes(llguidance)
    for path in sorted([*options.folder.glob("*.json"), *options.folder.glob("optional/format/*.json")]):
        examine(path, found, tokens, trial)
    figures = {
        "suite": f"{options.folder.parent.name}/{options.folder.name}",
        "schemas": found.schemas,
        "schemas_refused": sum(found.refused.values()),
        "refused_by_keyword": dict(found.refused.most_common()),
        "invalid_texts": found.invalid,
        "valid_texts": found.valid,
        "valid_texts_not_allowed": sum(found.lost.values()),
        "valid_texts_not_allowed_by_file": {name: count for name, count in found.lost.most_common() if count},
        "answers_drawn": found.drawn,
        "drawn_with_numbers_beyond_float64": found.too_large,
        "draws_without_end": found.unfinished,
        "invalid_answers_allowed": len(found.wrong),
    }
    print(json.dumps(figures, indent=2))
    for name, what, text in found.wrong:
        print(f"WRONG {name}: {what}: {text}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    sys.exit(bool(found.wrong))


if __name__ == "__main__":
    main()
