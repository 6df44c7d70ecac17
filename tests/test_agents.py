"""Coding agents, as their makers publish them, against a scripted model: each lists files, reads one, edits it and runs
it, and is resumed.

`make test-agents` installs them into `tests/clients/agents/`; without that, or without Node.js, this is skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fake_client import FakeClient, hf_byte_tokenizer, say

from engine.text.processor import Tokenizer
from server.app import create_app
from server.config.settings import ServerSettings

pytestmark = pytest.mark.slow

PACKAGES = Path(__file__).parent / "clients" / "agents" / "node_modules"
CLAUDE = PACKAGES / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"
CODEX = PACKAGES / "@openai" / "codex" / "bin" / "codex.js"
MODEL = "fake"
# As Qwen 2.5 has it; a byte is a token here, so that an agent's prompt has some 80,000.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "<|assistant|>"
)
ROOM = 1 << 18


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass
class Scripted:
    """A service whose n-th answer is the n-th text.

    Attributes:
        url: of it.
        prompts: what its model was asked.
        answers: path, status and ignored fields of each request.
    """

    texts: list[str]
    url: str = ""
    prompts: list[str] = field(default_factory=list)
    answers: list[tuple[str, int, str]] = field(default_factory=list)

    def script(self, request_id: str, source: Any, params: Any) -> Any:
        self.prompts.append(source.text)
        return say(request_id, [f"{self.texts[len(self.prompts) - 1]}\0"], params, "stop")

    def app(self) -> Any:
        """The app; what it answers is noted."""
        client = FakeClient(self.script)
        client.info = replace(client.info, max_model_len=ROOM, num_blocks=2 * ROOM // client.info.block_size)
        hf = hf_byte_tokenizer()
        hf.chat_template = TEMPLATE
        settings = ServerSettings(tool_call_parser="hermes", max_queue_time=0)
        app = create_app(client, Tokenizer(hf), MODEL, settings=settings)

        async def noting(scope: Any, receive: Any, send: Any) -> None:
            async def noted(message: Any) -> None:
                if message["type"] == "http.response.start" and scope["path"].startswith("/v1/"):
                    headers = dict(message["headers"])
                    ignored = headers.get(b"x-octavo-ignored-fields", b"").decode()
                    self.answers.append((scope["path"], message["status"], ignored))
                await send(message)

            await app(scope, receive, noted)

        return noting


@pytest.fixture
def scripted() -> Iterator[Callable[[list[str]], Scripted]]:
    """Starts such a service."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(texts: list[str]) -> Scripted:
        made = Scripted(texts)
        listener = socket.create_server(("127.0.0.1", 0))
        made.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(made.app(), log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        running.append((server, thread))
        return made

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join()


def run(command: list[str], folder: Path, environ: Mapping[str, str]) -> str:
    """What an agent prints; nothing but the service can be reached."""
    quiet = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1", "HOME": str(folder.parent)}
    done = subprocess.run(
        ["node", *command],
        cwd=folder,
        env={"PATH": os.environ["PATH"], **quiet, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the agent works in."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "greet.py").write_text('print("hello wrold")\n')
    return folder


def needs(program: Path) -> None:
    if shutil.which("node") is None or not program.exists():
        pytest.skip("make test-agents installs it, where there are Node.js and npm")


def test_claude_code(scripted: Callable[[list[str]], Scripted], folder: Path) -> None:
    needs(CLAUDE)
    file = str(folder / "greet.py")
    service = scripted(
        [
            f"I look first.\n{call('Bash', command='ls', description='List files')}",
            call("Read", file_path=file),
            call("Edit", file_path=file, old_string="wrold", new_string="world"),
            call("Bash", command=f"{sys.executable} greet.py", description="Run it"),
            "It says hello.",
            "It did work.",
        ]
    )
    environ = {
        "ANTHROPIC_BASE_URL": service.url, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_TELEMETRY": "1",
    }  # fmt: skip
    command = [str(CLAUDE), "--output-format", "json", "--allowedTools", "Bash,Read,Edit"]
    first = json.loads(run([*command, "-p", "Fix the greeting, and run it."], folder, environ))
    assert (first["is_error"], first["result"]) == (False, "It says hello."), first
    check_work(service, folder)
    assert "x-anthropic-billing-header" not in "".join(service.prompts)
    resumed = json.loads(run([*command, "--continue", "-p", "Did it work?"], folder, environ))
    assert (resumed["is_error"], resumed["result"]) == (False, "It did work."), resumed
    assert "It says hello." in service.prompts[-1]
    assert {status for _, status, _ in service.answers} == {200}


def test_codex(scripted: Callable[[list[str]], Scripted], folder: Path) -> None:
    needs(CODEX)
    service = scripted(
        [
            f"I look first.\n{call('exec_command', cmd='ls')}",
            call("exec_command", cmd="cat greet.py"),
            f"{call('multi_agent_v1__close_agent', target='a')}\n"
            f"{call('exec_command', cmd='sed -i s/wrold/world/ greet.py')}",
            call("exec_command", cmd=f"{sys.executable} greet.py"),
            "It says hello.",
            "It did work.",
        ]
    )
    home = folder.parent / "codex"
    home.mkdir()
    (home / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "octavo"\n[model_providers.octavo]\nname = "octavo"\n'
        f'base_url = "{service.url}/v1"\nwire_api = "responses"\nrequest_max_retries = 0\nstream_max_retries = 0\n'
    )
    command = [str(CODEX), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    first = run([*command, "Fix the greeting, and run it."], folder, {"CODEX_HOME": str(home)})
    assert first.strip().endswith("It says hello.")
    check_work(service, folder)
    assert "multi_agent_v1__close_agent" in service.prompts[3]
    resumed = run([*command, "resume", "--last", "Did it work?"], folder, {"CODEX_HOME": str(home)})
    assert resumed.strip().endswith("It did work.")
    assert "It says hello." in service.prompts[-1]
    assert {status for path, status, _ in service.answers if path == "/v1/responses"} == {200}
    assert "tools.web_search" in service.answers[-1][2]


def check_work(service: Scripted, folder: Path) -> None:
    """The agent did what it was told, and told what came of it."""
    assert (folder / "greet.py").read_text() == 'print("hello world")\n'
    looked, read, _, _, ran = service.prompts
    assert "Fix the greeting, and run it." in looked
    assert "I look first." in read
    assert "greet.py" in read.rpartition("</tool_call>")[2]
    assert "hello world" in ran.rpartition("</tool_call>")[2]
