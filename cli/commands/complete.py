"""`octavo complete`: one prompt, its completion."""

from __future__ import annotations

import json
import sys
from typing import Any

from cli.talking.answers import ChatAnswer, stream, whole
from cli.talking.model import COMPLETIONS, Model, talk
from cli.talking.options import add_decoding, add_place, settings_of
from cli.terminal.parser import OneLineParser
from cli.terminal.style import harmless, note, styled

PROG = "octavo complete"
DESCRIPTION = """\
Complete a prompt and stream the answer to stdout; everything else goes to stderr. With an encoder-decoder model, the
prompt is the encoder's input and the answer the decoder's output, such as a translation.

  octavo complete "Once upon a time" --temperature 0.8 --seed 7
  echo "Once upon a time" | octavo complete --max-tokens 64 > story.txt
  octavo complete "The sailor" --num-beams 4 --n 2
"""


def parser() -> OneLineParser:
    """The parser of prompt, server and decoding."""
    made = OneLineParser(prog=PROG, usage=f"{PROG} [PROMPT] [flags]", description=DESCRIPTION)
    made.add_argument(
        "prompt",
        metavar="PROMPT",
        nargs="?",
        help="text to complete; if it is missing or -, stdin without its final line break",
    )
    made.add_argument(
        "--model", metavar="MODEL", help="folder, GGUF file or hub id to load; with --url, the id of a model there"
    )
    made.add_argument("--echo", action="store_true", help="print the prompt before its completion")
    made.add_argument("--json", action="store_true", help="print the API's complete answer as JSON")
    made.add_argument("--stats", action="store_true", help="print tokens and speed to stderr, as in a terminal")
    made.add_argument("--no-stream", action="store_true", help="print the answer only when it is complete")
    add_place(made)
    add_decoding(made, beams=True)
    group = made.add_argument_group("answers")
    group.add_argument("--n", type=int, metavar="N", help="number of answers; with beams, the best N [1]")
    group.add_argument(
        "--ignore-eos", action="store_true", help="generate --max-tokens tokens even if the model would stop earlier"
    )
    group.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json: log-probabilities of each token and of the N most probable ones",
    )
    group = made.add_argument_group("encoder-decoder models")
    group.add_argument("--decoder-prompt", metavar="TEXT", help="beginning of the answer")
    group.add_argument(
        "--src-lang", metavar="LANG", help="language of the prompt, as the model spells it: en_XX for mBART-50"
    )
    group.add_argument("--tgt-lang", metavar="LANG", help="language of the answer")
    return made


def run(arguments: list[str]) -> int:
    """Complete. Returns 0, 1 for a failure, 2 for wrong flags, or 130 if Ctrl-C stopped it."""
    made = parser()
    given = made.parse_args(arguments)
    fields = settings_of(made, given)
    if given.logprobs is not None and not given.json:
        made.error("--logprobs needs --json")
    fields |= {
        name: value
        for name in ("decoder_prompt", "src_lang", "tgt_lang", "logprobs")
        if (value := getattr(given, name)) is not None
    }
    prompt = _prompt(made, given.prompt)

    def with_model(model: Model) -> int:
        model.require(COMPLETIONS)
        body = {"prompt": prompt, **fields}
        body.setdefault("max_tokens", model.room({"prompt": prompt}, given.decoder_prompt or ""))
        _complete(model, body, given)
        return 0

    return talk(PROG, given, with_model)


def _prompt(made: OneLineParser, given: str | None) -> str:
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        made.error('no prompt. Give one: octavo complete "Once upon a time", or pipe one in')
    try:
        text = sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as problem:
        made.error(f"stdin is not UTF-8 text ({problem.reason} at byte {problem.start})")
    if not text:
        made.error('stdin is empty. Give a prompt: octavo complete "Once upon a time", or pipe one in')
    return text


def _complete(model: Model, body: dict[str, Any], given: Any) -> None:
    if given.json:
        print(json.dumps(whole(model, body), indent=2, ensure_ascii=False))
        return
    if given.echo:
        print(styled(harmless(body["prompt"]), "dim"), end="", flush=True)
    if (given.n or 1) > 1 or given.no_stream:
        _print_choices(whole(model, body)["choices"])
        return
    answer, end = ChatAnswer(), ""
    try:
        for piece in stream(model, body, answer):
            end = harmless(piece)
            print(end, end="", flush=True)
    finally:
        print(flush=True)
    if given.stats or sys.stderr.isatty():
        cut = " (cut at --max-tokens)" if answer.finish_reason == "length" else ""
        note(f"{answer.line()}{cut}")


def _print_choices(choices: list[dict[str, Any]]) -> None:
    for choice in choices:
        number = styled(f"{choice['index'] + 1}:", "bold cyan") if len(choices) > 1 else ""
        print(f"{number} {harmless(choice['text']).lstrip()}" if number else harmless(choice["text"]))
