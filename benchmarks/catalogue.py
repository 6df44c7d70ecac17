"""Answers from a catalogue of titles: how long it loads and what it takes, what its masks cost, and beam searches over
it against `transformers.generate` with `prefix_allowed_tokens_fn`, all in one run.

The model is a random one of the shape of T5-small or BART-base with a byte-level tokenizer; titles are two to five
words of a vocabulary in which some words are frequent and most are rare. Parts:

    load      the file of titles to what constrains answers, in a process of its own each: Octavo's catalogue, and the
              trie of dictionaries that GENRE (arXiv:2010.00904) and its users have
    masks     a step's masks for 64 beams: as a search meets them (states from real searches), and where every beam is
              at a node with as many children as the trie has beside its root
    search    the same requests to both, rounds in turns, float32; the answers are compared

    python benchmarks/catalogue.py --output
    python benchmarks/catalogue.py --titles 50000 --requests 2 --beams 8
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from offline import ROOT, machine
from peers.checkpoints import ENCODER_DECODERS, EOS, LETTERS, tokenizer

from engine import LLM, SamplingParams
from engine.interface.sampling_table import mask_words
from engine.interface.trie import Member, Trie

SHAPES = ("t5-small", "bart-base", "t5-tiny", "bart-tiny")
WORDS = 60_000
MASKED = 64  # beams whose masks are measured
SEARCHES = ((8, 10), (4, 64), (1, 256))  # requests, beams
NAME = "titles"


def make_titles(count: int, seed: int = 0) -> list[str]:
    """Different titles, as texts."""
    rng = np.random.default_rng(seed)
    letters = np.array(list(LETTERS))
    words = sorted({"".join(rng.choice(letters, size=size)) for size in rng.integers(2, 11, WORDS)})
    rng.shuffle(words)
    found: dict[str, None] = {}
    while len(found) < count:
        lengths = rng.integers(2, 6, count)
        ranks = (len(words) * rng.random((count, 5)) ** 3).astype(np.int64)
        for size, row in zip(lengths.tolist(), ranks.tolist(), strict=True):
            found[" ".join(words[rank] for rank in row[:size])] = None
    return list(found)[:count]


def make_model(folder: Path, shape: str) -> None:
    """Save the random model, and a tokenizer of as many ids."""
    torch.manual_seed(0)
    model = ENCODER_DECODERS[shape]()
    model.generation_config.forced_eos_token_id = None
    model.save_pretrained(folder)
    tokenizer(model.config.vocab_size).save_pretrained(folder)


def resident() -> float:
    """Megabytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


# ---------------------------------------------------------------- load


def load_ours(folder: Path, file: Path) -> dict[str, Any]:
    """Load the engine."""
    from engine.engine import EngineConfig, EngineInfo
    from engine.interface.generation import load_defaults
    from engine.model.checkpoint import read_config
    from engine.text.catalogues import Catalogues
    from engine.text.tokenizer_loading import load_tokenizer

    config = read_config(folder)
    defaults = load_defaults(folder, config, config.vocab_size)
    info = EngineInfo(
        model=str(folder), model_path=str(folder), dtype="float32", kv_cache_dtype="float32", device="cpu",
        max_model_len=512, vocab_size=config.vocab_size, block_size=16, num_blocks=0, full_requests=0, max_num_seqs=1,
        max_num_beams=1, max_encoder_len=512,
    )  # fmt: skip
    found = load_tokenizer(folder)
    files = EngineConfig(model=str(folder), catalogue=(f"{NAME}={file}",)).catalogues
    before, started = resident(), time.perf_counter()
    catalogues = Catalogues(files, info, defaults, lambda: found)
    seconds = time.perf_counter() - started
    trie = catalogues._get(NAME).trie
    return measured(seconds, before) | {"nodes": trie.num_nodes, "trie_megabytes": round(trie.nbytes / 1e6, 1)}


def load_dictionaries(folder: Path, file: Path) -> dict[str, Any]:
    """Dictionaries within each other, of texts that the reference's tokenizer encodes."""
    found = transformers.AutoTokenizer.from_pretrained(folder)
    before, started = resident(), time.perf_counter()
    dictionaries(folder, file, found)
    return measured(time.perf_counter() - started, before)


def measured(seconds: float, before: float) -> dict[str, Any]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {
        "seconds": round(seconds, 2),
        "resident_megabytes": round(resident() - before),
        "peak_megabytes": round(peak - before),
    }


def dictionaries(folder: Path, file: Path, found: Any) -> dict[int, Any]:
    """The trie that users of `prefix_allowed_tokens_fn` make."""
    root: dict[int, Any] = {}
    lines = file.read_text().splitlines()
    for first in range(0, len(lines), 8192):
        texts = [json.loads(line) for line in lines[first : first + 8192]]
        for ids in found(texts, add_special_tokens=False).input_ids:
            node = root
            for token in [*ids, EOS]:
                node = node.setdefault(token, {})
    return root


# ---------------------------------------------------------------- masks


def measure_masks(trie: Trie, states: list[list[Member]], repeats: int = 30) -> dict[str, Any]:
    """Milliseconds for the masks of 64 beams: of steps of searches, and at the widest nodes."""
    spans = np.diff(trie.children)
    widest = np.argsort(spans[1:], kind="stable")[::-1][:MASKED] + 1
    wide = []
    for node in widest.tolist():
        state = Member(trie, [EOS])
        state._enter(node)
        wide.append(state)
    root = [Member(trie, [EOS]) for _ in range(MASKED)]

    def cost(chosen: list[Member]) -> float:
        masks = np.zeros((len(chosen), mask_words(trie.vocab_size)), dtype=np.uint32)
        times = []
        for _ in range(repeats):
            masks[:] = 0
            started = time.perf_counter()
            Member.fill_together(chosen, range(len(chosen)), masks)
            times.append(time.perf_counter() - started)
        return 1e3 * statistics.median(times)

    steps = [round(cost(state), 3) for state in states]
    trie._rows.clear()
    return {
        "rows": MASKED,
        "steps_of_a_search_ms": steps,
        "root_ms": round(cost(root), 3),
        "widest_nodes_ms": round(cost(wide), 3),
        "widest_children": [int(spans[widest].min()), int(spans[widest].max())],
    }


@contextmanager
def watched(states: list[list[Member]]) -> Any:
    """Collects the states whose masks are filled."""
    fill = Member.fill_together

    def watch(constraints: Any, places: Any, masks: Any) -> None:
        states.append([constraint.fork() for constraint in constraints])
        fill(constraints, places, masks)

    Member.fill_together = staticmethod(watch)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Member.fill_together = staticmethod(fill)  # type: ignore[method-assign]


# ---------------------------------------------------------------- search


Answers = list[list[list[int]]]


def ours(llm: LLM, inputs: list[list[int]], beams: int) -> Answers:
    params = SamplingParams(num_beams=beams, n=beams, constraint={"catalogue": NAME})
    outputs = llm.generate(inputs, params, use_tqdm=False)
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def theirs(model: Any, root: dict[int, Any], longest: int, inputs: list[list[int]], beams: int) -> Answers:
    """One padded batch."""

    def allowed(_: int, tokens: torch.Tensor) -> list[int]:
        node = root
        for token in tokens[1:].tolist():
            if token not in node:
                return [EOS]
            node = node[token]
        return list(node) or [EOS]

    width = max(map(len, inputs))
    ids = torch.zeros(len(inputs), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(inputs):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, num_beams=beams, num_return_sequences=beams,
            max_new_tokens=longest, prefix_allowed_tokens_fn=allowed,
        )  # fmt: skip
    rows = [row[: row.index(EOS) + 1] if EOS in row else row for row in output[:, 1:].tolist()]
    return [rows[first : first + beams] for first in range(0, len(rows), beams)]


def timed(run: Callable[[], Answers]) -> tuple[float, Answers]:
    started = time.perf_counter()
    answers = run()
    seconds = time.perf_counter() - started
    time.sleep(0.3)  # threads that wait for more to do have gone to sleep when the other one's turn comes
    return seconds, answers


def make_inputs(count: int, top: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(300, top) for _ in range(rng.randint(16, 64))] + [EOS] for _ in range(count)]


def median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="t5-small")
    parser.add_argument("--titles", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, help="instead of those of all searches, with --beams")
    parser.add_argument("--beams", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=("ours", "dictionaries"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, nargs="?", const=Path(), help="keep the result as JSON")
    options = parser.parse_args()
    if options.part is not None:
        load = load_ours if options.part == "ours" else load_dictionaries
        print(json.dumps(load(options.folder / "model", options.folder / "titles.jsonl")))
        return
    with tempfile.TemporaryDirectory() as name:
        result = run(Path(name), options)
    if options.output is not None:
        default = f"catalogue-{options.shape}.json"
        output = options.output if options.output.name else ROOT / "benchmarks" / "results" / default
        output.write_text(json.dumps(result, indent=2) + "\n")
        print(f"written to {output}")


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All parts, printed and as JSON."""
    file, path = folder / "titles.jsonl", folder / "model"
    make_model(path, options.shape)
    titles = make_titles(options.titles)
    file.write_text("".join(json.dumps(title) + "\n" for title in titles))
    result: dict[str, Any] = {
        "benchmark": "catalogue", "shape": options.shape, "titles": len(titles), "file_bytes": file.stat().st_size,
        "load": {}, "searches": [],
    }  # fmt: skip
    for part in ("ours", "dictionaries"):
        command = [sys.executable, __file__, "--part", part, "--folder", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        result["load"][part] = json.loads(done.stdout.splitlines()[-1])
        print(f"load {part}: {result['load'][part]}", flush=True)
    searches = SEARCHES if options.beams is None else ((options.requests or 1, options.beams),)
    most = max(beams for _, beams in searches)
    llm = LLM(
        str(path), dtype="float32", max_model_len=512, show_progress=False, enable_prefix_caching=False,
        catalogue=[f"{NAME}={file}"],
    )  # fmt: skip
    (info,) = llm.engine.info.catalogues
    trie = llm.engine._catalogues._get(NAME).trie
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float32).eval()
    root = dictionaries(path, file, transformers.AutoTokenizer.from_pretrained(path))
    top = model.config.vocab_size
    states: list[list[Member]] = []
    with watched(states):
        ours(llm, make_inputs(1, top), MASKED if most >= MASKED else most)
    result["masks"] = measure_masks(trie, [step for step in states if len(step) > 1])
    print(f"masks: {result['masks']}", flush=True)
    for requests, beams in searches:
        inputs = make_inputs(requests, top)
        peers: dict[str, Callable[[], Answers]] = {
            "octavo": lambda inputs=inputs, beams=beams: ours(llm, inputs, beams),
            "transformers": lambda inputs=inputs, beams=beams: theirs(model, root, info.longest + 1, inputs, beams),
        }
        answers = {peer: timed(run)[1] for peer, run in peers.items()}  # to warm up
        seconds: dict[str, list[float]] = {peer: [] for peer in peers}
        for _ in range(options.rounds):
            for peer, once in peers.items():
                took, answers[peer] = timed(once)
                seconds[peer].append(took)
        pairs = [
            (a, b)
            for one, other in zip(answers["octavo"], answers["transformers"], strict=True)
            for a, b in zip(one, other, strict=True)
        ]
        row = {
            "requests": requests,
            "beams": beams,
            "seconds": {peer: median(times) for peer, times in seconds.items()},
            "rounds": {peer: [round(took, 3) for took in times] for peer, times in seconds.items()},
            "ratio": median(b / a for a, b in zip(seconds["octavo"], seconds["transformers"], strict=True)),
            "equal_answers": {"equal": sum(a == b for a, b in pairs), "of": len(pairs)},
        }
        result["searches"].append(row)
        print(row, flush=True)
    llm.close()
    result["machine"] = machine()
    return result


if __name__ == "__main__":
    main()
