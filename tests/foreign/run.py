"""Runs another server's HTTP tests against an Octavo that runs already; see README.md beside this file."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

HERE = Path(__file__).resolve().parent
# Of vLLM's tests those of these folders are about HTTP.
_VLLM = ("openai", "anthropic", "generate/structured_decisions", "serve/tokenize", "serve/instrumentator")
_MODEL = re.compile(r'^( *(?:MODEL\w*|model|model_name) *(?::.*)?= *)"[^"]+"', re.MULTILINE)
_NAMED = re.compile(r'((?<![\w.])model=|"model": *)"[^"]*"')


def main() -> int:
    """Run what the command line asks for; pytest's status."""
    parser = argparse.ArgumentParser(description=__doc__, epilog="Arguments after -- go to pytest.")
    parser.add_argument("suite", choices=["vllm", "llama.cpp"])
    parser.add_argument("folder", type=Path, help="vLLM's source, or a folder that has tools/server/tests")
    parser.add_argument("url", help="of the running server, such as http://127.0.0.1:8000")
    parser.add_argument("--tokenizer", type=Path, help="folder of the served model's tokenizer, for vLLM's tests")
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    args, theirs = parser.parse_args(given[:end]), given[end + 1 :]
    with urllib.request.urlopen(f"{args.url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        copied = copy_vllm(args.folder, copy, model) if args.suite == "vllm" else copy_llama(args.folder, copy, model)
        address = urlsplit(args.url)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(copy)]),
            "FOREIGN_SUITE": args.suite,
            "FOREIGN_URL": args.url,
            "FOREIGN_MODEL": model,
            "FOREIGN_TOKENIZER": str((args.tokenizer or Path()).resolve()),
            "DEBUG_EXTERNAL": "1",
            "PORT": str(address.port or 80),
        }
        mode = "importlib" if args.suite == "vllm" else "prepend"
        command = [
            sys.executable, "-m", "pytest", "-p", "shim", "-p", "no:cacheprovider", "-q", "--tb=short",
            "--rootdir", folder, "-o", "asyncio_mode=auto", "--continue-on-collection-errors",
            f"--import-mode={mode}", "--timeout=60", *theirs, *copied,
        ]  # fmt: skip
        return subprocess.run(command, cwd=copy, env=environment, check=False).returncode


def copy_vllm(source: Path, copy: Path, model: str) -> list[str]:
    """The files that ask a server something, with the served model's name; the folders' own helpers besides."""
    root, found = source / "tests" / "entrypoints", []
    for file in sorted(path for part in _VLLM for path in (root / part).rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        test = file.name.startswith("test_")
        if test and "RemoteOpenAIServer" not in text:
            continue
        target = copy / "tests" / file.relative_to(source / "tests")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_MODEL.sub(rf'\1"{model}"', text), encoding="utf-8")
        if test:
            found.append(str(target.relative_to(copy)))
    shutil.copy(root / "conftest.py", copy / "tests" / "entrypoints" / "conftest.py")
    for folder in {copy / "tests", *(path.parent for path in (copy / "tests").rglob("*.py"))}:
        (folder / "__init__.py").touch()
    return found


def copy_llama(source: Path, copy: Path, model: str) -> list[str]:
    """All of the suite, with the served model's name."""
    shutil.copytree(source / "tools" / "server" / "tests", copy, dirs_exist_ok=True)
    for file in (copy / "unit").glob("*.py"):
        file.write_text(_NAMED.sub(rf'\1"{model}"', file.read_text(encoding="utf-8")), encoding="utf-8")
    return ["unit"]


if __name__ == "__main__":
    sys.exit(main())
