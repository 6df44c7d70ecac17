"""`octavo quantize`: a quantized copy of a checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cli.terminal.parser import OneLineParser
from cli.terminal.style import say, styled

PROG = "octavo quantize"
DESCRIPTION = """\
Write a quantized copy of a checkpoint in the compressed-tensors format, which transformers reads too for most
families. Octavo serves the copy without the original and without --quantization.

  octavo quantize org/name name-int8
  octavo quantize path/to/model path/to/new --quantization int4
  octavo serve path/to/new
"""
_KINDS = ("int8", "int8-fast", "int4")


def parser() -> OneLineParser:
    """The parser of MODEL, the folder and the format."""
    made = OneLineParser(prog=PROG, usage=f"{PROG} MODEL FOLDER [flags]", description=DESCRIPTION)
    made.add_argument("model", metavar="MODEL", help="folder, unquantized GGUF file, or hub id")
    made.add_argument(
        "folder", metavar="FOLDER", type=Path, help="new folder for the copy; it appears only when it is complete"
    )
    made.add_argument(
        "--quantization", "--to", choices=_KINDS, default="int8", help="format of the weight matrices [int8]"
    )
    made.add_argument("--revision", metavar="TEXT", help="branch, tag or commit on the hub")
    made.add_argument("--max-shard-size", metavar="SIZE", default="4GiB", help="maximum size of a weight file [4GiB]")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def run(arguments: list[str]) -> int:
    """Write the copy; returns 1 if that fails."""
    made = parser()
    given = made.parse_args(arguments)
    from engine import ConfigError, OctavoError, parse_bytes, quantise_checkpoint

    try:
        size = parse_bytes(given.max_shard_size, "--max-shard-size")
    except ConfigError as problem:
        made.error(str(problem))
    try:
        written = quantise_checkpoint(
            given.model,
            given.folder,
            given.quantization,
            revision=given.revision,
            shard_bytes=size,
            show_progress=sys.stderr.isatty(),
        )
    except OctavoError as problem:
        say(PROG, " ".join(str(problem).split()))
        return 1
    if given.json:
        found = {"folder": str(written.folder), "quantization": given.quantization, "matrices": written.quantised,
                 "plain": list(written.plain), "files": written.files, "bytes_before": written.before,
                 "bytes": written.after}  # fmt: skip
        print(json.dumps(found, indent=2))
        return 0
    if written.plain:
        count = len(written.plain)
        more = f" and {count - 3} more" if count > 3 else ""
        print(f"{count} matrices are not quantized in the copy but at each load: {', '.join(written.plain[:3])}{more}.")
    done = (
        f"Quantized {written.quantised} matrices to {given.quantization}. The weights take "
        f"{written.after / 2**20:.1f} MiB "
        f"instead of {written.before / 2**20:.1f} MiB. Serve them: octavo serve {given.folder}"
    )
    print(styled(done, "green"))
    return 0
