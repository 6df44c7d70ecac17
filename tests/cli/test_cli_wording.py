"""Texts of the command line: help and errors at any width, advice on misspelt paths, models that cannot chat."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.service import PATIENCE, ROOT

from cli.commands import COMMANDS, overview
from cli.errors import TalkError
from cli.main import main
from cli.talking.conversation import TerminalConversation
from cli.talking.slash import Slash
from cli.terminal.paragraphs import fill
from engine import ModelLoadError, find_here, lacks_chat_template

PARSERS = [(name, kind) for name, command in COMMANDS.items() for kind in ("", *dict(command.kinds))]


def words(text: str) -> list[str]:
    return text.split()


@pytest.mark.parametrize("width", [30, 50, 80])
def test_lines_break_between_words_and_columns_stay_aligned(width: int) -> None:
    text = (
        "One paragraph that is longer than a line of any of these widths, with a-word-of-hyphens --and-a-flag.\n"
        "  octavo chat      a description that needs a second line if the terminal is as narrow as this\n"
        "\n"
        "  /a/path/that/is/longer/than/any/of/the/lines/and/stays/whole/whatever/the/width/may/be.gguf"
    )
    filled = fill(text, width)
    assert words(filled) == words(text)
    assert all(len(line) <= width or len(words(line)) == 1 for line in filled.split("\n"))
    lines = filled.split("\n")
    start = next(number for number, line in enumerate(lines) if line.startswith("  octavo chat"))
    column = lines[start].find("a description")
    if column < 0:  # too narrow for two columns
        assert lines[start] == "  octavo chat"
        assert lines[start + 1].startswith("      a description")
    else:
        assert re.match(rf" {{{column}}}\S", lines[start + 1])


@pytest.mark.parametrize("width", [60, 80])
def test_help_fits_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for name, kind in PARSERS:
        for line in COMMANDS[name].parser(kind).format_help().split("\n"):
            names_a_flag = re.fullmatch(r"  -(\S+ ?)+", line)
            assert len(line) <= width or names_a_flag, f"octavo {name}: {line}"
    assert all(len(line) <= 80 for line in overview().split("\n"))


def test_help_has_one_style() -> None:
    """A flag's help ends without a full stop; defaults are in brackets, and choices are separated by |."""
    for name, kind in PARSERS:
        parser = COMMANDS[name].parser(kind)
        for flag, text in re.findall(r"(?m)^  (-\S.*?)(?:  |\n)((?:.*\n(?! {0,3}\S))*.*)", parser.format_help()):
            plain = " ".join(text.split())
            assert not re.search(r"\.( [\[(][^\])]*[\])])*$", plain), f"octavo {name} {flag}: {plain}"
            assert "(default" not in plain, f"octavo {name} {flag}: {plain}"
            assert "{" not in flag, f"octavo {name} {flag}"


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name, kind in PARSERS:
        shown = []
        for arguments in ([name, kind, "--help"], ["help", name, kind]):
            with pytest.raises(SystemExit) if name != "bench" or kind else _returns() as left:
                main([argument for argument in arguments if argument])
            assert left is None or left.value.code == 0
            shown.append(capsys.readouterr())
        assert shown[0] == shown[1]
        assert shown[0].err == ""
        assert shown[0].out.startswith(f"usage: octavo {name}")
        assert "--no-color" in shown[0].out


class _returns:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *problem: object) -> None:
        return None


# ---------------------------------------------------------------- paths


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("models/smol/SmolLM2-Instruct.Q4.gguf", "models/smol/SmolLM2-Instruct.Q4_1.gguf"),
        ("modles/smol/SmolLM2-Instruct.Q4_1.gguf", "models/smol/SmolLM2-Instruct.Q4_1.gguf"),
        ("modles/smoll/smollm2.gguf", "models/smol/SmolLM2-Instruct.Q4_1.gguf"),
        ("model/lama", "models/llama"),
        ("nothing/like/it.gguf", None),
    ],
)
def test_misspelt_folders_are_corrected_too(
    given: str, meant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "smol").mkdir(parents=True)
    (tmp_path / "models" / "smol" / "SmolLM2-Instruct.Q4_1.gguf").touch()
    (tmp_path / "models" / "llama").mkdir()
    (tmp_path / "models" / "llama" / "config.json").touch()
    for base in (Path("."), tmp_path):
        with pytest.raises(ModelLoadError) as caught:
            find_here(f"./{given}" if base == Path(".") else str(base / given))
        if meant is None:
            assert "Did you mean" not in str(caught.value)
        else:
            assert str(caught.value).endswith(f" Did you mean {base / meant}?")


# ---------------------------------------------------------------- chat


def base_model(folder: Path, architecture: str = "LlamaForCausalLM", **tokenizer: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def test_a_base_model_is_known_by_its_files(tmp_path: Path) -> None:
    assert lacks_chat_template(base_model(tmp_path / "base"))
    assert not lacks_chat_template(base_model(tmp_path / "chat", chat_template="{{ messages }}"))
    assert not lacks_chat_template(base_model(tmp_path / "bert", "BertModel"))  # has a refusal of its own
    beside = base_model(tmp_path / "beside")
    (beside / "chat_template.jinja").write_text("{{ messages }}")
    assert not lacks_chat_template(beside)
    metadata = b"GGUF...general.architecture", b"tokenizer.chat_template...{{ messages }}", b"token_embd.weight..."
    for name, parts, lacks in (("a", metadata, False), ("b", metadata[::2], True), ("c", metadata[::-1], True)):
        (tmp_path / f"{name}.gguf").write_bytes(b"".join(parts))
        assert lacks_chat_template(tmp_path / f"{name}.gguf") == lacks, name
    (tmp_path / "empty.gguf").touch()
    assert not lacks_chat_template(tmp_path / "empty.gguf")  # loading it says what is wrong


@pytest.mark.parametrize("command", ["chat", "run"])
def test_a_base_model_is_refused_before_it_is_loaded(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*arguments: object) -> None:
        raise TalkError("it was loaded")

    monkeypatch.setattr("cli.talking.private.private_server", load)
    folder = str(base_model(tmp_path / "base"))
    assert main([command, folder]) == 1
    said = capsys.readouterr().err
    assert "has no chat template, so it does not support conversations" in said
    assert f"octavo complete --model {folder} PROMPT" in said
    assert "set --chat-template, for example to chatml" in said
    assert main([command, folder, "--chat-template", "chatml"]) == 1
    assert "it was loaded" in capsys.readouterr().err
    monkeypatch.setenv("OCTAVO_CHAT_TEMPLATE", "chatml")
    assert main([command, folder]) == 1
    assert "it was loaded" in capsys.readouterr().err


def test_settings_are_commands_of_a_chat() -> None:
    settings: dict[str, object] = {}
    slash = Slash(TerminalConversation(), settings, "m", {})
    assert slash.run("/temperature 0") == ("temperature = 0.0", None)
    assert settings == {"temperature": 0.0}
    assert slash.run("/top-k=5") == ("top_k = 5", None)
    assert slash.run("/temperature")[0].startswith("temperature = 0.0. To change it: ")
    assert slash.run("/set temperature default") == ("temperature = default", None)
    assert settings == {"top_k": 5}
    with pytest.raises(TalkError, match=r"unknown command /temprature; did you mean /temperature\?"):
        slash.run("/temprature 0")
    with pytest.raises(TalkError, match="temperature must be"):
        slash.run("/temperature -1")
    with pytest.raises(TalkError, match=r"unknown command /tempp; did you mean /temperature\?"):
        slash.run("/tempp 0")
    assert slash.completions("", "/te") == ["/temperature "], "the value can be typed at once"
    assert slash.completions("", "/to") == ["/top_k", "/top_p", "/top_n_sigma"]
    assert slash.completions("/set ", "see") == ["seed "]


def test_settings_show_the_models_defaults() -> None:
    card = {
        "decoding": {"temperature": 0.8, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.0},
        "given_up_for_temperature": ["top_k"],
    }
    slash = Slash(TerminalConversation(), {"stop": ["x"], "min_p": 0.1}, "m", card)
    lines = str(slash.run("/set")[0]).splitlines()
    assert lines[0] == "stop = ['x']"
    assert {"temperature = 0.8 (default)", "top_k = 40 (default)", "min_p = 0.1", "seed = random (default)"} <= {*lines}
    assert "repetition_penalty = 1 (default)" in lines
    assert "max_tokens = default" in lines, "the server does not say it"
    assert slash.run("/temperature 1") == ("temperature = 1.0", None)
    assert slash.run("/top_k")[0].startswith("top_k = off, because temperature is set (default without it: 40). To")
    assert slash.run("/set min_p default") == ("min_p = 0.05 (default)", None)


# ---------------------------------------------------------------- an environment without the dependencies


@pytest.mark.parametrize(
    "arguments", [("-c", "from octavo import LLM"), ("-m", "octavo", "serve")], ids=["library", "command"]
)
def test_a_missing_package_is_one_line(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-S", *arguments]  # -S: without site-packages
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, env={})
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert re.search(rf"the package \w+, which Octavo needs, is not installed for .* Run: make -C {ROOT} install", last)
    if arguments[0] == "-m":
        assert run.stderr.strip() == last
