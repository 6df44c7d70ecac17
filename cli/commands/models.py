"""`octavo models`: the supported families, and a check of a checkpoint."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.terminal.parser import OneLineParser
from cli.terminal.style import is_rich, print_table, say, styled
from server.config.wording import did_you_mean

if TYPE_CHECKING:
    from engine import ModelFacts

PROG = "octavo models"
DESCRIPTION = """\
List the supported model families. With a name, list the families and architectures whose names contain it. With a
checkpoint, show whether it is supported, which tasks it serves, and how many concurrent requests fit into the memory
that is free now. Only the headers of its files are read.

  octavo models                   all families
  octavo models qwen              families whose name contains qwen
  octavo models path/to/model     check a checkpoint
"""
_SETTINGS = ("max_model_len", "kv_cache_memory", "quantization", "tensor_parallel_size", "mmproj")
_LISTED = Path(__file__).with_name("families.json")  # written from the registry, see tools/families_table.py


def parser() -> OneLineParser:
    """The parser of a name or a checkpoint, and of --json."""
    made = OneLineParser(prog=PROG, usage=f"{PROG} [NAME|MODEL] [flags]", description=DESCRIPTION)
    made.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="part of the name of a family or architecture; or a folder, GGUF file or hub id",
    )
    group = made.add_argument_group("settings for a checkpoint (as in octavo serve)")
    group.add_argument("--max-model-len", metavar="N", type=int, help="maximum tokens of prompt and answer together")
    group.add_argument("--kv-cache-memory", metavar="SIZE", help="size of the KV cache")
    group.add_argument("--tensor-parallel-size", metavar="N", type=int, help="processes that divide each layer")
    group.add_argument(
        "--quantization", choices=("none", "int8", "int8-fast", "int4", "stored"), help="format of the weight matrices"
    )
    group.add_argument("--mmproj", metavar="FILE", help="image projector of a GGUF file, or none")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def run(arguments: list[str]) -> int:
    """List the families or check a checkpoint; returns 1 if the family does not exist or the checkpoint is not
    supported."""
    made = parser()
    given = made.parse_args(arguments)
    if given.model is not None and _is_checkpoint(given.model):
        settings = {name: getattr(given, name) for name in _SETTINGS}
        return _tell(
            given.model, {name: value for name, value in settings.items() if value is not None}, as_json=given.json
        )
    found = [row for row in families() if _matches(row, given.model or "")]
    if not found:
        names = [name for row in families() for name in (row["family"], *row["architectures"])]
        near = did_you_mean(given.model, names) or "; octavo models lists them all"
        say(PROG, f"no supported family or architecture is called {given.model!r}{near}")
        return 1
    if given.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return 0
    rows = [(row["family"], ", ".join(row["serves"]), ", ".join(row["architectures"])) for row in found]
    print_table(("family", "serves", "architectures"), rows)
    if is_rich():
        print(f"{len(found)} families. octavo models MODEL checks a checkpoint.")
    return 0


def families() -> list[dict[str, Any]]:
    """The name, the features and the tasks of each family."""
    rows: list[dict[str, Any]] = json.loads(_LISTED.read_text(encoding="utf-8"))
    return rows


def _matches(row: dict[str, Any], part: str) -> bool:
    names = (row["family"], *row["architectures"])
    plain = part.lower().replace("-", "").replace(" ", "")
    return any(plain in name.lower().replace("-", "").replace(" ", "") for name in names)


def _is_checkpoint(name: str) -> bool:
    path = Path(name)
    return os.sep in name or name.startswith("~") or name == "." or path.suffix == ".gguf" or path.exists()


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Facts about a checkpoint: lines for people, values for programs."""

    supported: bool
    message: str
    facts: tuple[tuple[str, str, Any], ...] = ()


def _tell(model: str, settings: dict[str, Any], *, as_json: bool) -> int:
    verdict = _examine(model, settings)
    if as_json:
        values = {name.replace(" ", "_"): value for name, _, value in verdict.facts}
        found = {"model": model, "supported": verdict.supported, "message": verdict.message, **values}
        print(json.dumps(found, indent=2))
    elif verdict.supported:
        width = max(len(name) for name, _, _ in verdict.facts)
        for name, text, _ in verdict.facts:
            print(f"{styled(f'{name:<{width}}', 'cyan')}  {text}")
        print(styled(f"Supported. {verdict.message}", "green"))
    else:
        say(PROG, verdict.message)
    return 0 if verdict.supported else 1


def _examine(model: str, settings: dict[str, Any]) -> _Verdict:
    from engine import EngineConfig, NotDownloadedError, OctavoError, inspect_model
    from engine.text.processor import load_tokenizer

    try:
        facts = inspect_model(EngineConfig(model=os.path.expanduser(model), **settings))
        tokenizer = None if facts.no_tokenizer else load_tokenizer(str(facts.path))
    except NotDownloadedError as problem:
        near = (
            ""
            if "Did you mean" in str(problem)
            else f" To download it: octavo serve {model}."
            if ":" in model or model.endswith(".gguf")
            else f" To download it: hf download {model}, or octavo serve {model}."
        )
        return _Verdict(False, f"{problem}{near}")
    except OctavoError as problem:
        return _Verdict(False, " ".join(str(problem).split()))
    family = next((row["family"] for row in families() if facts.architecture in row["architectures"]), "")
    writes = "generate" in facts.tasks and not facts.hears
    chats = writes and facts.max_encoder_len is None and tokenizer is not None and tokenizer.chat_template is not None
    known = "none" if tokenizer is None else f"{tokenizer.vocab_size} tokens"
    tasks = ("transcribe",) if facts.hears else facts.tasks
    shown: list[tuple[str, str, Any]] = [
        ("architecture", f"{facts.architecture}{f' ({family})' if family else ''}", facts.architecture),
        ("tasks", ", ".join(tasks), list(tasks)),
        ("context", f"{facts.max_model_len} tokens", facts.max_model_len),
    ]
    if facts.max_encoder_len is not None:
        what, of = ("sound", "positions") if facts.hears else ("prompts", "tokens")
        shown.append((what, f"{facts.max_encoder_len} {of}, read by the encoder", facts.max_encoder_len))
    if facts.image_tokens:
        by = f", read by {facts.projector}" if facts.projector else ""
        shown.append(("images", f"at most {facts.image_tokens} tokens for each in a chat{by}", facts.image_tokens))
    if facts.images:
        taken = f"{_mebi(facts.images)} for kept vectors and to read the largest image"
        shown.append(("image memory", taken, facts.images))
    if facts.stored:
        held = ", ".join(f"{name} {held / 2**20:.1f} MiB" for name, held in facts.stored.items())
        shown.append(("stored as", held, facts.stored))
    form = "packed as stored" if facts.quantization == "stored" else f"in {facts.quantization or facts.dtype}"
    weights = f"{_mebi(facts.weights)} {form}, on {facts.device}"
    if facts.weights_as_stored and facts.quantization is None:
        weights += f"; {_mebi(facts.weights_as_stored)} with --quantization stored"
    shown.append(("weights", weights, facts.weights))
    shown += _ranks(facts)
    if facts.num_blocks:
        tokens = facts.num_blocks * facts.block_size
        pages = f"{tokens} tokens: {facts.num_blocks} pages of {facts.block_size} tokens, {_mebi(facts.pages)}"
        length = facts.max_model_len + (facts.max_encoder_len or 0)
        shown += [
            ("pages", f"{pages} in {facts.kv_cache_dtype}", facts.num_blocks),
            *([("states", f"{facts.num_states} slots, {_mebi(facts.states)}", facts.num_states)] * bool(facts.states)),
            ("requests", f"{facts.full_requests:.1f} requests of {length} tokens fit; at most {facts.max_num_seqs} run "
             "at the same time", facts.full_requests),
        ]  # fmt: skip
    if facts.resident:
        taken = (
            f"{_mebi(facts.resident)} for the engine's process{'es' * bool(facts.ranks)} before the first request, "
            f"at most {_mebi(facts.peak)} while loading"
        )
        shown.append(("at rest", taken, facts.resident))
    if facts.grammars:
        when = "prepared at start" if facts.early_grammars else "with the first such request"
        shown.append(("grammars", f"{_mebi(facts.grammars)} more for structured output, {when}", facts.grammars))
    what = "weights, pages and images" if facts.images else "weights and pages"
    shown += [
        ("memory", f"{_mebi(facts.planned)} for {what}; {_mebi(facts.free)} are free", facts.planned),
        ("tokenizer", known, tokenizer and tokenizer.vocab_size),
        ("chat template", "yes" if chats else "no", chats),
    ]  # fmt: skip
    if facts.no_tokenizer:
        return _Verdict(True, f"{facts.no_tokenizer} Then: octavo serve {model} --tokenizer NAME", tuple(shown))
    ways = [f"octavo serve {model}" + (f" --mmproj {settings['mmproj']}" if "mmproj" in settings else "")]
    if writes:
        ways.append(f"octavo chat {model}" if chats else f"octavo complete --model {model} PROMPT")
    return _Verdict(
        True, f"Serve it: {ways[0]}" + "".join(f"; use it in the terminal: {way}" for way in ways[1:]), tuple(shown)
    )


def _ranks(facts: ModelFacts) -> list[tuple[str, str, Any]]:
    """The ranks' parts of a divided model, or the numbers of ranks that can divide it."""
    if facts.ranks:
        parts = "; ".join(f"{rank.heads} heads, {_mebi(rank.weights)}" for rank in facts.ranks)
        return [("ranks", f"{len(facts.ranks)}: {parts}", [rank.weights for rank in facts.ranks])]
    if facts.indivisible:
        return [("ranks", f"cannot be divided: {', '.join(facts.indivisible)}", [])]
    if not facts.divisible:
        return []
    return [("ranks", f"--tensor-parallel-size {', '.join(map(str, facts.divisible))}", list(facts.divisible))]


def _mebi(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
