"""What a tree answers, to the bit, so that a change of the inside can show that it changes nothing.

Every shape of every family answers the same requests: greedily, sampled by all filters, and by beam search, in each
format of weights and pages; encoders give their vectors, classes and masked tokens. Bits depend on the machine, so two
trees are recorded on the same one, from the same checkpoints:

    PYTHONPATH=tests:. python -m support.corpus checkpoints FOLDER
    PYTHONPATH=tests:. python -m support.corpus record FOLDER before.json       in the tree before
    PYTHONPATH=tests:. python -m support.corpus record FOLDER after.json        in the tree after
    PYTHONPATH=tests:. python -m support.corpus compare before.json after.json

`compare` names the cases that differ, and its status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from engine import LLM, OctavoError, PoolingParams, SamplingParams, Seq2SeqInput, TokenInput
from support.checkpoints import random_prompt
from support.encoders import ENCODER_SHAPES, make_encoder_checkpoint
from support.families import FAMILY_SHAPES, make_family_checkpoint
from support.family_shape import prompt_of
from support.seq2seq import make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES as SEQ2SEQ_SHAPES

# Settings of the engine; what a family cannot be served with is recorded as such.
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
    "float32, pages int8": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "float32, pages fp8": {"dtype": "float32", "kv_cache_dtype": "fp8"},
}
COMMON: dict[str, Any] = {
    "device": "cpu",
    "show_progress": False,
    "skip_tokenizer_init": True,
    "quantization_cache": "off",
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 256,
    "max_step_time": 0,
}
TOKENS = 12
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
    "greedy with edits": {
        "temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2,
        "logit_bias": {5: 2.0, 9: -3.0}, "no_repeat_ngram_size": 3, "suppress_tokens": [12], "min_tokens": 4,
    },
    "sampled": {"temperature": 0.9, "seed": 7, "n": 2, "logprobs": 1},
    "sampled by filters": {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 11, "n": 2},
    "beams": {"num_beams": 4, "n": 3, "length_penalty": 0.8, "early_stopping": False},
    "beams, early": {"num_beams": 3, "n": 2, "length_penalty": 1.2, "early_stopping": True, "no_repeat_ngram_size": 2},
}  # fmt: skip
TASKS = {
    "SequenceClassification": "classify",
    "TokenClassification": "token_classify",
    "QuestionAnswering": "answer",
    "QuestionAnsweringSimple": "answer",
    "MaskedLM": "fill_mask",
    "WithLMHeadModel": "fill_mask",
    "BertForPreTraining": "fill_mask",
}


def make_checkpoints(folder: Path) -> None:
    """Those of all shapes that are not there yet."""
    kinds: tuple[tuple[dict[str, Any], Any], ...] = (
        (FAMILY_SHAPES, make_family_checkpoint),
        (SEQ2SEQ_SHAPES, make_seq2seq_checkpoint),
        (ENCODER_SHAPES, make_encoder_checkpoint),
    )
    for shapes, make in kinds:
        for name, shape in shapes.items():
            if not (folder / name / "config.json").exists():
                make(shape, folder / name)


def record(folder: Path, only: Sequence[str] = ()) -> dict[str, Any]:
    """The answers by case; a case is `shape | format | search`."""
    answers: dict[str, Any] = {}
    for name in sorted({*FAMILY_SHAPES, *SEQ2SEQ_SHAPES, *ENCODER_SHAPES}):
        if only and name not in only:
            continue
        pages = name not in ENCODER_SHAPES
        own: dict[str, Any] = {"max_num_batched_tokens": 1024}
        if name in FAMILY_SHAPES:  # prompts come in parts, beside rows that decode
            own = {"max_num_batched_tokens": 64, "max_model_len": FAMILY_SHAPES[name].max_model_len}
        for form, settings in FORMATS.items():
            if "kv_cache_dtype" in settings and not pages:
                continue
            try:
                llm = LLM(str(folder / name), **(COMMON | own | settings))
            except OctavoError as problem:
                answers[f"{name} | {form}"] = f"{type(problem).__name__}: {problem}".replace(str(folder), "")
                continue
            try:
                cases = _pooled(llm, name) if name in ENCODER_SHAPES else _generated(llm, name)
                answers |= {f"{name} | {form} | {what}": answer for what, answer in cases}
            finally:
                llm.close()
        print(name, file=sys.stderr, flush=True)
    return answers


def _generated(llm: LLM, name: str) -> Iterator[tuple[str, Any]]:
    prompts = _prompts(name, llm.engine.info.max_model_len - TOKENS)
    for what, search in SEARCHES.items():
        answers = llm.generate(prompts, SamplingParams(max_tokens=TOKENS, **search), use_tqdm=False)
        yield what, [[_plain(answer.outputs), _plain(answer.prompt_logprobs)] for answer in answers]


def _prompts(name: str, longest: int) -> list[Any]:
    if name in SEQ2SEQ_SHAPES:
        shape = SEQ2SEQ_SHAPES[name]
        cases = [shape.case(place, seed) for place, seed in enumerate(shape.seeds)]
        return [Seq2SeqInput(case.source, case.begin[1:]) for case in cases]
    shape = FAMILY_SHAPES[name]
    prompts = [prompt_of(shape, seed)[:longest] for seed in shape.prompts]
    long = random_prompt(shape.vocab, 99, min(130, longest))
    return [*prompts, long, (prompts[0] + prompts[-1])[:longest]]  # the last one begins as the first does


def _pooled(llm: LLM, name: str) -> Iterator[tuple[str, Any]]:
    shape = ENCODER_SHAPES[name]
    task: Any = next((task for ending, task in TASKS.items() if shape.architecture.endswith(ending)), "embed")
    positions = [0, 1] if task == "fill_mask" else None
    lengths = (2, 3, 17, 40, llm.engine.info.max_model_len)
    inputs = [TokenInput(random_prompt(shape.vocab, seed, length)) for seed, length in enumerate(lengths)]
    for number, input in enumerate(inputs):
        llm.engine.add_request(str(number), input, PoolingParams(task=task, positions=positions, top_k=2))
    found: dict[str, Any] = {}
    while llm.engine.has_unfinished_requests():
        found |= {delta.request_id: delta.pooled for delta in llm.engine.step_deltas() if delta.finished}
    yield task, [_plain(found[str(number)]) for number in range(len(inputs))]


def _plain(value: Any) -> Any:
    """A value as JSON has it: floats and bytes to the bit, long ones by their digest."""
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The cases that are not the same, or are in one record alone."""
    return sorted(case for case in before.keys() | after.keys() if before.get(case) != after.get(case))


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="support.corpus", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("checkpoints").add_argument("folder", type=Path)
    recording = commands.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("out", type=Path)
    recording.add_argument("--only", nargs="*", default=(), help="these shapes")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "checkpoints":
        make_checkpoints(options.folder)
        return 0
    if options.command == "record":
        options.out.write_text(json.dumps(record(options.folder, options.only), indent=1) + "\n")
        return 0
    before, after = (json.loads(path.read_text()) for path in (options.before, options.after))
    found = differences(before, after)
    print(*found, f"{len(found)} of {len(before.keys() | after.keys())} cases differ", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
