"""The command line as a user meets it: the overview, wrong turns, colours and plain text, how soon it is there."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from support.image_text import make_image_model
from support.service import PATIENCE, ROOT, environment

from cli.commands import COMMANDS, SYNONYMS
from cli.commands.models import families
from cli.main import main
from server.config.settings import DEMO_MODEL

ESCAPE = "\x1b["


def octavo(*arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a pipe."""
    return subprocess.run(
        [sys.executable, "-m", "octavo", *arguments],
        cwd=ROOT, env=environment() | variables, input=stdin, capture_output=True, text=True, timeout=PATIENCE,
        check=False,
    )  # fmt: skip


def in_terminal(*arguments: str, **variables: str) -> tuple[int, str]:
    """The command in a terminal of its own: exit status, and what it shows."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))  # lines and columns
    environ = {**environment(), "TERM": "xterm-256color", "COLUMNS": "120", **variables}
    environ = {name: value for name, value in environ.items() if value}
    command = [sys.executable, "-m", "octavo", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=environ, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # what Linux says where the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    return process.wait(PATIENCE), shown.decode()


# ---------------------------------------------------------------- the overview


def test_the_overview_shows_the_commands_in_their_groups() -> None:
    run = octavo("--help")
    assert (run.returncode, run.stderr) == (0, "")
    places = [run.stdout.index(f"\n{group}:\n") for group in dict.fromkeys(c.group for c in COMMANDS.values())]
    assert places == sorted(places)
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.about)}$", run.stdout, re.MULTILINE)
    assert octavo("help").stdout == octavo("-h").stdout == run.stdout
    assert ESCAPE not in run.stdout


def test_the_overview_and_the_families_are_there_at_once() -> None:
    """Neither torch nor anything of the server is imported for what needs none."""
    code = (
        "import sys; from cli.main import main; main(sys.argv[1:]); "
        "sys.exit(','.join(name for name in ('torch', 'numpy', 'pydantic', 'asyncio', 'rich') if name in sys.modules))"
    )
    for arguments in (["--help"], ["--version"], ["models"], ["models", "--json"]):
        command = [sys.executable, "-c", code, *arguments]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
        assert run.stderr.strip() == "", arguments


# ---------------------------------------------------------------- colours


@pytest.mark.parametrize(
    ("arguments", "sign"),
    [(["--help"], "complete"), (["chat", "--help"], "--temperature"), (["models", "llama"], "LlamaForCausalLM"),
     (["config"], "max_num_seqs")],
    ids=["overview", "help", "models", "config"],
)  # fmt: skip
@pytest.mark.slow
def test_a_terminal_gets_colours_unless_they_are_not_wanted(arguments: list[str], sign: str) -> None:
    status, shown = in_terminal(*arguments)
    assert status == 0
    assert ESCAPE in shown
    assert sign in shown
    for plain in ({"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": ""}):
        status, shown = in_terminal(*arguments, **plain)
        assert status == 0
        assert ESCAPE not in shown, plain
        assert sign in shown
    for place in ([*arguments, "--no-color"], ["--no-color", *arguments]):
        status, shown = in_terminal(*place)
        assert status == 0
        assert ESCAPE not in shown


def test_an_error_is_coloured_in_a_terminal_only() -> None:
    status, shown = in_terminal("srve")
    assert status == 2
    assert ESCAPE in shown
    assert "did you mean serve?" in shown
    assert ESCAPE not in octavo("srve").stderr


# ---------------------------------------------------------------- wrong turns


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["chta"], "unknown command 'chta'; did you mean chat?"),
        (["generate"], "unknown command 'generate'; did you mean complete?"),
        (["server/config"], "unknown command 'server/config'; to serve that model: octavo serve server/config"),
        (["serve", "--prot", "80"], "unknown flag --prot; did you mean --port?"),
        (["serve", "a", "b"], "unexpected argument 'b'"),
        (["complete", "A", "cat"], "unexpected argument 'cat'; put a text of several words in quotation marks"),
        (["complete", "x", "--temprature", "1"], "unknown flag --temprature; did you mean --temperature?"),
        (["complete", "x", "--temperature", "hot"], "--temperature must be a number, got 'hot'"),
        (["complete", "x", "--temperature", "-1"], "--temperature must be at least 0.0, got -1.0"),
        (["complete", "x", "--dtype", "float3"], "--dtype must be one of auto, float32, bfloat16, float16, got"),
        (["complete", "x", "--timeout", "-1"], "--timeout must be a number above 0, got '-1'"),
        (["complete", "x", "--top-k"], "--top-k: expected one argument"),
        (["complete", "x", "--min-tokens=9", "--max-tokens=3"], "--min-tokens (9) must not exceed --max-tokens (3)"),
        (["complete", "x", "--early-stopping", "nver"], "must be one of true, false, never, got 'nver'; did you mean"),
        (["chat", "--model", "x"], "unknown flag --model: give the model without a flag, after the command"),
        (["chat", "--modle", "x"], "unknown flag --modle: give the model without a flag, after the command"),
        (["complete", "--prompt", "x"], "unknown flag --prompt: give the prompt without a flag, after the command"),
        (["chat", "--port", "9000"], "unknown flag --port: use --url http://HOST:PORT for a server"),
        (["serve", "--demo", "caht"], "--demo must be one of chat, seq2seq, got 'caht'; did you mean chat?"),
        (["version"], "unknown command 'version'; did you mean --version?"),
        (["-V"], "unknown flag '-V'; did you mean --version?"),
        (["bench"], "choose a kind: offline"),
        (["bench", "ofline"], "unknown kind 'ofline'; did you mean offline?"),
        (["bench", "train"], "unknown kind 'train'; the only kind is offline"),
        (["bench", "--url", "x"], "--url must come after the kind"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_wrong_turn_names_the_right_one(arguments: list[str], said: str) -> None:
    run = octavo(*arguments)
    assert run.returncode == 2
    assert run.stdout == ""
    assert said in run.stderr
    assert run.stderr.startswith("octavo")
    assert run.stderr.count("\n") == 1


def test_ctrl_c_ends_any_command_in_one_line() -> None:
    script = (
        "import os, signal, sys, types; from cli.main import main; from cli.commands import COMMANDS; "
        "COMMANDS['doctor'] = types.SimpleNamespace(run=lambda _: signal.raise_signal(signal.SIGINT)); "
        "sys.argv = ['octavo', 'doctor']; sys.exit(main())"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "octavo doctor: stopped.\n")


def test_synonyms_lead_to_commands() -> None:
    assert set(SYNONYMS.values()) <= set(COMMANDS)
    assert not set(SYNONYMS) & set(COMMANDS)


# ---------------------------------------------------------------- octavo models


def test_models_lists_the_families() -> None:
    run = octavo("models")
    assert (run.returncode, run.stderr) == (0, "")
    lines = run.stdout.splitlines()
    assert lines[0].split() == ["family", "serves", "architectures"]
    assert [line.partition("  ")[0] for line in lines[1:]] == [row["family"] for row in families()]
    assert json.loads(octavo("models", "--json").stdout) == families()


def test_models_finds_what_is_called_so() -> None:
    def found(name: str) -> list[str]:
        rows: list[dict[str, Any]] = json.loads(octavo("models", name, "--json").stdout)
        return [row["family"] for row in rows]

    assert found("qwen2") == ["Qwen2", "Qwen2-MoE and Qwen3-MoE"]
    assert found("LlamaForCausalLM") == ["LLaMA"]
    assert found("gpt neox") == ["GPT-NeoX"]
    run = octavo("models", "lama2")
    assert run.returncode == 1
    assert run.stdout == ""
    assert "no supported family or architecture is called 'lama2'; did you mean LLaMA?" in run.stderr


def test_models_looks_at_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", str(DEMO_MODEL)]) == 0
    shown = capsys.readouterr().out
    assert "LlamaForCausalLM (LLaMA)" in shown
    assert f"Serve it: octavo serve {DEMO_MODEL}; use it in the terminal: octavo chat {DEMO_MODEL}" in shown
    assert main(["models", str(DEMO_MODEL), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["supported"] is True
    assert facts["chat_template"] is True
    assert "generate" in facts["tasks"]
    assert facts["requests"] == facts["pages"] * 16 / facts["context"] > 1
    assert facts["memory"] > facts["weights"]

    limits = ["--max-model-len", "64", "--kv-cache-memory", "1MiB", "--quantization", "int4"]
    assert main(["models", str(DEMO_MODEL), *limits]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"pages +\d+ tokens: \d+ pages of 16 tokens, 1\.0 MiB in \w+", shown)
    assert re.search(r"requests +\d+\.\d requests of 64 tokens fit; at most 128 run at the same time", shown)
    assert "MiB in int4" in shown
    assert re.search(r"ranks +--tensor-parallel-size 2\b", shown)
    assert main(["models", str(DEMO_MODEL), "--tensor-parallel-size", "2"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"ranks +2: \d+ heads, [\d.]+ MiB; \d+ heads, [\d.]+ MiB", shown)
    sizes = re.search(r"at rest +([\d.]+) MiB for the engine's processes .*, at most ([\d.]+) MiB while loading", shown)
    assert sizes is not None
    assert float(sizes[1]) < float(sizes[2])
    assert main(["models", str(DEMO_MODEL), "--tensor-parallel-size", "7"]) == 1
    assert "cannot be divided among 7 ranks" in capsys.readouterr().err

    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    assert main(["models", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "The architecture 'MambaForCausalLM' is not supported" in told.err
    assert main(["models", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["supported"] is False
    assert main(["models", str(tmp_path / "nothing")]) == 1
    assert "does not exist. Give a folder with config.json, or a model on the hub" in capsys.readouterr().err
    shutil.copytree(DEMO_MODEL, tmp_path / "my-model")
    assert main(["models", str(tmp_path / "my-modle")]) == 1
    assert f"does not exist. Did you mean {tmp_path / 'my-model'}?" in capsys.readouterr().err
    assert main(["models", "no/such-model"]) == 1
    assert "no/such-model" in capsys.readouterr().err


def test_models_reads_the_preprocessor_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that would end `octavo serve` at its start is told here, too."""
    folder = make_image_model("vit", tmp_path).path
    assert main(["models", str(folder)]) == 0
    assert f"Serve it: octavo serve {folder}" in capsys.readouterr().out
    for values, problem in (
        ({"image_processor_type": "BeitImageProcessor"}, "image_processor_type is 'BeitImageProcessor'; supported"),
        ({"size": 30}, "the preprocessor makes images of 30 x 30 pixels, but the model reads 24 x 24"),
    ):
        (folder / "preprocessor_config.json").write_text(json.dumps(values))
        assert main(["models", str(folder)]) == 1
        assert problem in capsys.readouterr().err
