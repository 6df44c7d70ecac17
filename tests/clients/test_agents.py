"""Coding agents, as their makers publish them, against a scripted model: each lists files, reads one, edits it and runs
it, and is resumed.

`make test-agents` installs them into `tests/clients/agents/`; without that, or without Node.js, this is skipped.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
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

PACKAGES = Path(__file__).parent / "agents" / "node_modules"
CLAUDE = PACKAGES / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"
CODEX = PACKAGES / "@openai" / "codex" / "bin" / "codex.js"
PYTHON_AGENTS = Path(os.environ.get("OCTAVO_TEST_CLIENTS", Path(sys.prefix) / "clients"))
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
        first_turn: the first text answers this turn of any conversation, since some agents ask for titles besides, or
            begin with turns of their own; 0: the n-th request is answered with the n-th text.
        url: of it.
        prompts: what its model was asked.
        answers: path, status and ignored fields of each request.
    """

    texts: list[str]
    first_turn: int = 0
    url: str = ""
    prompts: list[str] = field(default_factory=list)
    answers: list[tuple[str, int, str]] = field(default_factory=list)

    def script(self, request_id: str, source: Any, params: Any) -> Any:
        self.prompts.append(source.text)
        place = source.text.count("<|assistant|>") - self.first_turn if self.first_turn else len(self.prompts) - 1
        text = self.texts[place] if 0 <= place < len(self.texts) else "Done."
        return say(request_id, [f"{text}\0"], params, "stop")

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

    def start(texts: list[str], first_turn: int = 0) -> Scripted:
        made = Scripted(texts, first_turn)
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


def run(command: list[str], folder: Path, environ: Mapping[str, str], interpreter: str = "node") -> str:
    """What an agent prints; nothing but the service can be reached."""
    quiet = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1", "HOME": str(folder.parent)}
    done = subprocess.run(
        [interpreter, *command],
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
def folder(tmp_path: Path) -> Iterator[Path]:
    """What the agent works in. Processes that it leaves behind are ended: Cline starts a daemon."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "greet.py").write_text('print("hello wrold")\n')
    yield folder
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if os.fsencode(folder) in command.read_bytes():
                os.kill(int(command.parent.name), signal.SIGTERM)


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


@dataclass(frozen=True)
class Agent:
    """An agent that is told what to do on its command line.

    Attributes:
        program: below PACKAGES.
        shell: a call of its tool for shell commands.
        command: its arguments before what it is told.
        resume: further ones, to go on with the last session; none: that needs a terminal (`resume_cline`).
        files: what it reads, by path in its home; @ stands for the service's address.
        environ: likewise.
        setup: arguments of a first run, which tells it where the service is.
        first_turn: of the conversation, which is answered first.
    """

    program: str
    shell: Callable[[str], str]
    command: list[str]
    resume: list[str]
    files: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)
    first_turn: int = 1


AGENTS = {
    "opencode": Agent(
        "opencode-ai/bin/opencode.exe",
        lambda command: call("bash", command=command, description="Work"),
        ["run", "--auto"],
        ["--continue"],
        {
            ".config/opencode/opencode.json": {
                "model": f"octavo/{MODEL}",
                "provider": {
                    "octavo": {
                        "npm": "@ai-sdk/openai-compatible",
                        "options": {"baseURL": "@/v1"},
                        "models": {MODEL: {"limit": {"context": ROOM, "output": 4096}}},
                    }
                },
            }
        },
    ),
    "continue": Agent(
        "@continuedev/cli/dist/cn.js",
        lambda command: call("Bash", command=command),
        ["--auto", "-p"],
        ["--resume"],
        {
            ".continue/config.yaml": {
                "name": "octavo",
                "version": "1.0.0",
                "schema": "v1",
                "models": [{"name": MODEL, "model": MODEL, "provider": "openai", "apiBase": "@/v1", "apiKey": "none"}],
            }
        },
    ),
    "qwen-code": Agent(
        "@qwen-code/qwen-code/cli.js",
        lambda command: call("run_shell_command", command=command, is_background=False),
        ["--yolo", "--auth-type", "openai", "-p"],
        ["--continue"],
        # It sends all requests through a proxy, whatever NO_PROXY says.
        environ={"OPENAI_BASE_URL": "@/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL, "HTTPS_PROXY": ""},
        first_turn=2,
    ),
    "cline": Agent(
        "cline/bin/cline",
        lambda command: call("run_commands", commands=[command]),
        [],
        [],
        setup=["auth", "-p", "openai-compatible", "-b", "@/v1", "-k", "none", "-m", MODEL],
    ),
    "pi": Agent(
        "@mariozechner/pi-coding-agent/dist/cli.js",
        lambda command: call("bash", command=command),
        ["--provider", "octavo", "--model", MODEL, "-p"],
        ["--continue"],
        {
            ".pi/agent/models.json": {
                "providers": {
                    "octavo": {
                        "baseUrl": "@/v1",
                        "api": "openai-completions",
                        "apiKey": "none",
                        "models": [{"id": MODEL, "contextWindow": ROOM, "maxTokens": 4096}],
                    }
                }
            }
        },
    ),
}


@pytest.mark.parametrize("name", AGENTS)
def test_agents_of_npm(name: str, scripted: Callable[..., Scripted], folder: Path) -> None:
    agent = AGENTS[name]
    needs(PACKAGES / agent.program)
    shell = agent.shell
    service = scripted(
        [
            f"I look first.\n{shell('ls')}",
            shell("cat greet.py"),
            shell("sed -i s/wrold/world/ greet.py"),
            shell(f"{sys.executable} greet.py"),
            "It says hello.",
            "It did work.",
        ],
        agent.first_turn,
    )
    for path, content in agent.files.items():
        file = folder.parent / path
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(content).replace("@/v1", f"{service.url}/v1"))
    environ = {key: value.replace("@/v1", f"{service.url}/v1") for key, value in agent.environ.items()}
    program = PACKAGES / agent.program
    command = [str(program), *agent.command]
    node = "node" if program.suffix in (".js", "") else command.pop(0)
    if agent.setup:
        setup = [part.replace("@/v1", f"{service.url}/v1") for part in agent.setup]
        run([*command[:1], *setup], folder, environ, node)
    assert "It says hello." in run([*command, "Fix the greeting, and run it."], folder, environ, node)
    assert (folder / "greet.py").read_text() == 'print("hello world")\n'
    turns = (agent.first_turn, agent.first_turn + 4)
    first, last = (next(p for p in service.prompts if p.count("<|assistant|>") == turn) for turn in turns)
    assert "Fix the greeting, and run it." in first
    assert "hello world" in last.rpartition("</tool_call>")[2]
    resumed = [*command[:1], *agent.resume, *command[1:]] if node == "node" else [*command, *agent.resume]
    if name == "cline":
        resume_cline(program, folder, service)
    else:
        assert "It did work." in run([*resumed, "Did it work?"], folder, environ, node)
        assert any("It says hello." in prompt for prompt in service.prompts if "Did it work?" in prompt)
    assert {status for path, status, _ in service.answers if path != "/v1/models"} == {200}


def resume_cline(program: Path, folder: Path, service: Scripted) -> None:
    """Cline goes on with a session only in a terminal, which shows the answer piece by piece: the request tells."""
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder.parent), "TERM": "xterm-256color"}
    environ |= {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
    sessions = json.loads(run(["history", "--json"], folder, environ, str(program)))
    number = len(service.answers)
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execve(program, [str(program), "--id", sessions[0]["sessionId"]], environ)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    try:
        end, shown = time.monotonic() + 120, b""
        while len(service.answers) == number and time.monotonic() < end:
            if select.select([terminal], [], [], 1.0)[0]:
                shown += os.read(terminal, 1 << 16)
            elif b"anything" in shown:  # it has loaded, and waits
                os.write(terminal, b"\r" if b"Did it" in shown else b"Did it work?")
    finally:
        os.kill(process, signal.SIGTERM)
        os.close(terminal)
        os.waitpid(process, 0)
    assert "Did it work?" in service.prompts[-1]
    assert "It says hello." in service.prompts[-1]


EDIT = """I fix it.

greet.py
```python
<<<<<<< SEARCH
print("hello wrold")
=======
print("hello world")
>>>>>>> REPLACE
```
"""


def test_aider(scripted: Callable[..., Scripted], folder: Path) -> None:
    """It has no tools: it sends the file, and reads edits in the answer."""
    needs(PYTHON_AGENTS / "aider" / "aider")
    service = scripted([EDIT, "It did work."])
    environ = {
        "PYTHONPATH": str(PYTHON_AGENTS / "aider"), "OPENAI_API_BASE": f"{service.url}/v1", "OPENAI_API_KEY": "none",
    }  # fmt: skip
    command = ["-m", "aider", "--model", f"openai/{MODEL}", "--no-git", "--yes-always", "--no-check-update"]
    command += ["--edit-format", "diff", "--no-show-model-warnings", "--analytics-disable"]
    command += ["--no-show-release-notes", "greet.py"]
    run([*command, "--message", "Fix the greeting."], folder, environ, sys.executable)
    assert (folder / "greet.py").read_text() == 'print("hello world")\n'
    assert "hello wrold" in service.prompts[0]
    told = run([*command, "--restore-chat-history", "--message", "Did it work?"], folder, environ, sys.executable)
    assert "It did work." in told
    assert "I fix it." in service.prompts[1]
    assert {status for _, status, _ in service.answers} == {200}


def test_llm(scripted: Callable[..., Scripted], folder: Path) -> None:
    needs(PYTHON_AGENTS / "llm" / "llm")
    service = scripted([call("shout", text="hello"), "It says HELLO.", "It did work."])
    home = folder.parent / "llm"
    home.mkdir()
    model = {"model_id": "octavo", "model_name": MODEL, "api_base": f"{service.url}/v1", "supports_tools": True}
    (home / "extra-openai-models.yaml").write_text(json.dumps([model]))
    environ = {"PYTHONPATH": str(PYTHON_AGENTS / "llm"), "LLM_USER_PATH": str(home), "OPENAI_API_KEY": "none"}
    functions = "def shout(text: str) -> str:\n    return text.upper()\n"
    command = ["-m", "llm", "-m", "octavo"]
    told = run([*command, "--functions", functions, "Shout hello."], folder, environ, sys.executable)
    assert "It says HELLO." in told
    assert "HELLO" in service.prompts[1].rpartition("</tool_call>")[2]
    assert "It did work." in run([*command, "-c", "Did it work?"], folder, environ, sys.executable)
    assert "It says HELLO." in service.prompts[2]
    assert {status for _, status, _ in service.answers} == {200}


def check_work(service: Scripted, folder: Path) -> None:
    """The agent did what it was told, and told what came of it."""
    assert (folder / "greet.py").read_text() == 'print("hello world")\n'
    looked, read, _, _, ran = service.prompts
    assert "Fix the greeting, and run it." in looked
    assert "I look first." in read
    assert "greet.py" in read.rpartition("</tool_call>")[2]
    assert "hello world" in ran.rpartition("</tool_call>")[2]
