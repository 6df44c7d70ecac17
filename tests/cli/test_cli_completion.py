"""`octavo completion`: what the shells make of its scripts, each asked as its user asks it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from support.service import PATIENCE
from test_cli import octavo

from cli.commands import COMMANDS
from cli.completion.shape import shapes

SHELLS = ("bash", "zsh", "fish")
CASES = [
    ("octavo ch", {"chat"}),
    ("octavo ", set(COMMANDS)),
    ("octavo serve --dty", {"--dtype"}),
    ("octavo serve --dtype bf", {"bfloat16"}),
    ("octavo some-flag-first --no", set()),
    ("octavo bench of", {"offline"}),
    ("octavo bench offline --num-req", {"--num-requests"}),
    ("octavo complete --early-stopping ne", {"never"}),
    ("octavo completion z", {"zsh"}),
    ("octavo serve --config folder/sett", {"folder/settings.yaml"}),
    ("octavo serve fol", {"folder", "folder/"}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds each shell's script, and something to name."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "folder").mkdir()
    (folder / "folder" / "settings.yaml").write_text("")
    for shell in SHELLS:
        run = octavo("completion", shell)
        assert (run.returncode, run.stderr) == (0, "")
        (folder / shell).write_text(run.stdout)
    return folder


def ask(command: list[str], folder: Path) -> str:
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.stderr == ""
    return run.stdout


def needs(shell: str) -> str:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed")
    return found


@pytest.mark.parametrize(("line", "wanted"), CASES)
def test_bash(line: str, wanted: set[str], folder: Path) -> None:
    def completed(words: list[str]) -> set[str]:
        listed = " ".join(map(shlex.quote, words))
        code = (
            f'. ./bash; COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; _octavo; printf "%s\\n" "${{COMPREPLY[@]}}"'
        )
        return set(ask([needs("bash"), "--norc", "-c", code], folder).split())

    words = line.split(" ")
    assert completed(words) - {"folder/"} == wanted - {"folder/"}
    if words[-2].startswith("--"):  # bash takes --flag=value apart
        assert completed([*words[:-1], "=", words[-1]]) == wanted


def test_bash_knows_the_function() -> None:
    assert "complete -F _octavo octavo" in octavo("completion", "bash").stdout


@pytest.mark.parametrize(("line", "wanted"), CASES)
def test_fish(line: str, wanted: set[str], folder: Path) -> None:
    code = f"source ./fish; complete -C {shlex.quote(line)}"
    shown = {row.split("\t")[0] for row in ask([needs("fish"), "--no-config", "-c", code], folder).splitlines()}
    assert shown - {"folder"} == wanted - {"folder"}


# Types a line and Tab into a shell in a terminal, and prints what stands there then.
TYPIST = """\
zmodload zsh/zpty
zpty z zsh -f -i
zpty -w z 'unset zle_bracketed_paste; autoload -U compinit; compinit -u -D; source ./zsh; PS1="rea""dy"'
# What is typed before the shell reads keys is only echoed.
zpty -r z out '*ready'
zpty -n -w z "$1"$'\\t'" # end"$'\\n'
while zpty -r z out; do
    print -r -- "$out"
    [[ $out == *"# end"* ]] && break
done
zpty -d z
"""


@pytest.mark.parametrize(("line", "wanted"), [case for case in CASES if len(case[1]) == 1])
def test_zsh(line: str, wanted: set[str], folder: Path) -> None:
    shown = ask([needs("zsh"), "-f", "-c", TYPIST, "zsh", line], folder)
    completed = line.rpartition(" ")[0] + " " + wanted.pop()
    assert completed in shown


def test_every_flag_is_in_every_script(folder: Path) -> None:
    for shape in shapes():
        for flag in shape.flags:
            for name in flag.names:
                assert name in (folder / "bash").read_text()
                assert f"{name}=[" in (folder / "zsh").read_text() or f"{name}[" in (folder / "zsh").read_text()
                assert (
                    f"-l {name[2:]} " in (folder / "fish").read_text()
                    or f"-s {name[1:]} " in (folder / "fish").read_text()
                )


def test_a_wrong_shell() -> None:
    run = octavo("completion", "bsh")
    assert (run.returncode, run.stdout) == (2, "")
    assert "must be one of bash, zsh, fish, got 'bsh'; did you mean bash?" in run.stderr
    assert octavo("completion").returncode == 2
