"""`octavo chat` and `octavo complete` as processes: in a pipe and in a terminal, against a server and without one."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fake_server import FakeServer
from support.service import PATIENCE, ROOT, Service, environment
from test_cli import ESCAPE, in_terminal, octavo

from cli.talking.answers import ChatAnswer
from server.config.settings import DEMO_MODEL

pytestmark = pytest.mark.slow


@pytest.fixture
def url(bundled: Callable[..., Service]) -> str:
    """Of the bundled model's server."""
    return bundled().url


class Terminal:
    """A command in a terminal, which a person types into."""

    def __init__(self, *arguments: str, **variables: str):
        self._ours, theirs = pty.openpty()
        environ = {**environment(), "TERM": "xterm-256color", "COLUMNS": "120", **variables}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo", *arguments],
            cwd=ROOT, env=environ, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C is a signal then
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""

    def wait_for(self, text: str) -> str:
        """What was shown since the last call, up to and with this text."""
        assert self._shows(text, PATIENCE), f"no {text!r} in {self.shown!r}"
        seen, _, self.shown = self.shown.partition(text)
        return seen + text

    def _shows(self, text: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            if time.monotonic() >= deadline:
                return False
            if select.select([self._ours], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self.shown += os.read(self._ours, 65536).decode(errors="replace")
        return True

    def interrupt(self, text: str) -> None:
        """Ctrl-C at the prompt until it shows that text. Python's line editor heeds one only once it waits for a key,
        which is a moment after the prompt is shown."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self.type("\x03")
            if self._shows(text, 2):
                break
            assert time.monotonic() < deadline, f"no {text!r} in {self.shown!r}"
        self.wait_for(text)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def end(self) -> int:
        """The exit status."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            if select.select([self._ours], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self.shown += os.read(self._ours, 65536).decode(errors="replace")
        os.close(self._ours)
        return self.process.wait()


def unused_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def context(url: str) -> int:
    """Tokens that prompt and answer may have."""
    return int(httpx.get(f"{url}/v1/models", timeout=PATIENCE).json()["data"][0]["max_model_len"])


def sentences(url: str, tokens: int) -> str:
    """A text of at most that many tokens, and nearly so many."""
    sentence = "The sailor sings. "
    count = httpx.post(f"{url}/tokenize", json={"prompt": sentence * 10}, timeout=PATIENCE).json()["count"]
    return sentence * (tokens * 10 // count - 1)


# ---------------------------------------------------------------- run


def test_run_serves_while_it_chats() -> None:
    port = unused_port()
    terminal = Terminal("run", "--port", str(port), "--temperature", "0")
    terminal.wait_for(f"octavo-demo, at http://127.0.0.1:{port}. /help lists")
    assert context(f"http://127.0.0.1:{port}") > 0
    taken = octavo("run", "--port", str(port))
    assert (taken.returncode, taken.stdout) == (1, "")
    assert taken.stderr.startswith(f"octavo run: cannot listen on 127.0.0.1, port {port}: ")
    terminal.type("What is a token?\n")
    terminal.wait_for("A token is a piece of text")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    with pytest.raises(httpx.ConnectError):
        context(f"http://127.0.0.1:{port}")


# ---------------------------------------------------------------- complete


def test_complete_writes_the_answer_alone_to_stdout(url: str) -> None:
    greedy = ("--temperature", "0", "--max-tokens", "8", "--min-tokens", "8")
    given = octavo("complete", "The sailor", "--url", url, *greedy)
    assert (given.returncode, given.stderr) == (0, "")
    assert given.stdout.strip()
    assert given.stdout.endswith("\n")
    assert ESCAPE not in given.stdout
    piped = octavo("complete", "--url", f"{url}/v1", *greedy, stdin="The sailor\n")
    assert piped.stdout == given.stdout
    assert octavo("complete", "-", "--url", url, *greedy, stdin="The sailor").stdout == given.stdout
    whole = octavo("complete", "The sailor", "--url", url, "--no-stream", *greedy)
    assert whole.stdout == given.stdout
    echoed = octavo("complete", "The sailor", "--url", url, "--echo", "--stats", *greedy)
    assert echoed.stdout == "The sailor" + given.stdout
    assert "8 tokens, " in echoed.stderr
    assert "tokens/s" in echoed.stderr


@pytest.mark.parametrize(
    ("first", "seconds", "speed"), [(0.2, 2.2, "10.0 tokens/s"), (0.2, 0.205, "102.4 tokens/s"), (0.2, 0.2, "105.0")]
)
def test_the_speed_is_no_fiction_where_all_came_at_once(first: float, seconds: float, speed: str) -> None:
    line = ChatAnswer(tokens=21, first=first, seconds=seconds).line()
    assert line.startswith(f"21 tokens, 0.20 s to the first, {speed}")


def test_a_prompt_is_needed() -> None:
    for given, said in (("", "stdin is empty"), ("\n", "stdin is empty")):
        run = octavo("complete", stdin=given)
        assert (run.returncode, run.stdout) == (2, "")
        assert said in run.stderr
    status, shown = in_terminal("complete")
    assert status == 2
    assert 'no prompt. Give one: octavo complete "Once upon a time", or pipe one in' in shown


def test_complete_prints_the_answer_as_json(url: str) -> None:
    flags = ("--max-tokens", "4", "--min-tokens", "4", "--num-beams", "3", "--n", "2", "--logprobs", "1", "--json")
    run = octavo("complete", "The sailor", "--url", url, *flags)
    answer = json.loads(run.stdout)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 4
    assert answer["usage"]["completion_tokens"] == 8


def test_complete_shows_each_of_several_answers(url: str) -> None:
    run = octavo("complete", "The sailor", "--url", url, "--max-tokens", "4", "--num-beams", "3", "--n", "3")
    assert [line.split()[0] for line in run.stdout.splitlines()] == ["1:", "2:", "3:"]


def test_a_seed_gives_the_same_answer(url: str) -> None:
    first, again, other = (
        octavo(
            "complete", "The sailor", "--url", url, "--temperature", "1", "--max-tokens", "24", "--seed", seed
        ).stdout
        for seed in ("7", "7", "8")
    )
    assert first == again != other


def test_an_answer_has_room_in_a_small_context(url: str) -> None:
    """Without --max-tokens an answer has 128 tokens, or what the prompt leaves."""
    prompt = sentences(url, context(url) - 40)
    run = octavo("complete", prompt, "--url", url, "--temperature", "0", "--ignore-eos", "--json")
    assert run.returncode == 0, run.stderr
    usage = json.loads(run.stdout)["usage"]
    assert usage["total_tokens"] == context(url)
    run = octavo("complete", "The sailor", "--url", url, "--ignore-eos", "--json")
    assert json.loads(run.stdout)["usage"]["completion_tokens"] == 128


def test_complete_leaves_with_its_reader(url: str) -> None:
    command = f"{sys.executable} -m octavo complete 'The sailor' --url {url} --ignore-eos | head -c 3"
    run = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=PATIENCE
    )
    assert len(run.stdout) == 3
    assert run.stderr == ""


def test_a_model_is_loaded_where_nothing_serves(short_folder: Path) -> None:
    """Nothing of it is left behind."""
    free = {"OCTAVO_PORT": str(unused_port()), "OCTAVO_KV_CACHE_MEMORY": "64MiB", "TMPDIR": str(short_folder)}
    run = octavo("complete", "The sailor", "--temperature", "0", "--max-tokens", "8", "--min-tokens", "8", **free)
    assert run.returncode == 0, run.stderr
    assert "No server answers at http://127.0.0.1:" in run.stderr
    assert "loading the bundled model" in run.stderr
    assert run.stdout.strip()
    named = octavo(
        "complete", "The sailor", "--model", str(DEMO_MODEL), "--dtype", "float32", "--temperature", "0",
        "--max-tokens", "8", **free,
    )  # fmt: skip
    assert named.stdout == run.stdout
    assert named.stderr == ""
    assert list(short_folder.glob("octavo*")) == []


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="o-") as folder:
        yield Path(folder)


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_a_server_that_is_not_there(command: str) -> None:
    port = unused_port()
    words = ["x"] if command == "complete" else []
    run = octavo(command, *words, "--url", f"http://127.0.0.1:{port}")
    assert (run.returncode, run.stdout) == (1, "")
    assert f"no server answers at http://127.0.0.1:{port}" in run.stderr
    assert f"Start one: octavo serve --port {port}" in run.stderr
    assert run.stderr.count("\n") == 1


def test_models_that_are_not_there(url: str) -> None:
    for arguments, said in (
        (("x", "--model", "./nope"), "The folder nope does not exist"),
        (("x", "--model", "octavo-dem", "--url", url), "has no model 'octavo-dem'; did you mean octavo-demo?"),
        (("x", "--url", "ftp://x"), "--url must look like http://HOST:PORT"),
        (("x", "--url", url, "--dtype", "float32"), "--dtype is for a model that this command loads"),
        (("x", "--model", str(DEMO_MODEL), "--device", "gpu"), "device must be auto, cpu, cuda or cuda:N, got 'gpu'"),
        (("x", "--url", url, "--max-tokens", "99999"), str(context(url))),
    ):
        run = octavo("complete", *arguments)
        assert (run.returncode, run.stdout.strip()) == (1, ""), arguments
        assert said in run.stderr
        assert run.stderr.count("\n") == 1, run.stderr


def test_an_encoder_decoder_model_completes() -> None:
    flags = ("--demo", "seq2seq", "--num-beams", "4", "--n", "2", "--decoder-prompt", "Later the")
    run = octavo("complete", "luma li vulpa en li silva li lantan trovet.", *flags)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0] == "1: fox found the lantern in the forest."
    assert run.stdout.splitlines()[1].startswith("2: ")


@pytest.mark.parametrize(
    ("card", "command", "said"),
    [
        (
            {"endpoints": ["/v1/completions"], "tasks": ["generate"]}, "chat",
            "m has no chat template, so it does not support conversations. Use: octavo complete --url",
        ),
        (
            {"endpoints": ["/v1/completions"], "tasks": ["generate"], "max_encoder_len": 9}, "chat",
            "m is an encoder-decoder model and does not support conversations. Use:",
        ),
        (
            {"endpoints": ["/v1/embeddings"], "tasks": ["embed"]}, "chat",
            "m does not generate text; its tasks are embed. Serve it (octavo serve) and use its endpoints: /v1",
        ),
        ({"endpoints": ["/v1/embeddings"], "tasks": ["embed"]}, "complete", "m does not generate text; its tasks are "
            "embed"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_made_for_it(card: dict[str, Any], command: str, said: str) -> None:
    with FakeServer() as server:
        server.other["/v1/models"] = (200, {"data": [{"id": "m", **card}]})
        run = octavo(command, *(["x"] if command == "complete" else []), "--url", server.url, stdin="Hello\n")
    assert (run.returncode, run.stdout) == (1, "")
    assert said in run.stderr
    assert run.stderr.count("\n") == 1


def test_what_a_server_may_do_wrong() -> None:
    async def cut(server: FakeServer, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        server.begin(writer)
        server.event(writer, {"choices": [{"index": 0, "text": "begun", "finish_reason": None}]})
        writer.close()
        return True

    async def silent(server: FakeServer, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        await asyncio.Event().wait()
        return True

    async def failing(server: FakeServer, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        server.begin(writer)
        server.event(writer, {"error": {"message": "It broke.", "code": "internal_error"}})
        server.end(writer)
        return True

    async def full(server: FakeServer, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        server.whole(writer, 503, {"error": {"message": "Too many requests wait.", "code": "overloaded"}})
        return True

    for play, flags, out, said in (
        (cut, (), "begun\n", "closed the connection"),
        (silent, ("--timeout", "2.5"), "\n", "sent nothing for 2.5 seconds (--timeout)"),
        (failing, (), "\n", "It broke."),
        (full, (), "\n", "Too many requests wait."),
    ):
        with FakeServer() as server:
            server.play = play
            run = octavo("complete", "x", "--url", server.url, *flags)
        assert run.returncode == 1, play
        assert run.stdout == out
        assert said in run.stderr
        assert run.stderr.count("\n") == 1
    with FakeServer() as server:
        server.other["/v1/models"] = (401, {"error": {"message": "no"}})
        run = octavo("complete", "x", "--url", server.url)
        assert "requires an API key. Set --api-key or OCTAVO_API_KEY" in run.stderr
        server.other["/v1/models"] = (200, "a page")
        run = octavo("complete", "x", "--url", server.url)
        assert "lists no models. Is it an OpenAI-compatible server? (--url)" in run.stderr


def test_a_server_that_goes_away_between_two_requests() -> None:
    """Nothing is loaded in its place: the answer would be another model's."""
    with FakeServer() as server:
        server.keep_alive = False
        server.other["/tokenize"] = (200, {"count": 5})
        server.other["/v1/models"] = (200, {"data": [{"id": "m", "max_model_len": 50}]})

        async def gone(server: FakeServer, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
            writer.transport.abort()
            return True

        server.play = gone
        run = octavo("complete", "x", OCTAVO_PORT=server.url.rpartition(":")[2])
    assert run.returncode == 1
    assert "closed the connection" in run.stderr
    assert run.stderr.count("\n") == 1


def test_a_key_is_sent() -> None:
    with FakeServer() as server:
        octavo("complete", "x", "--url", server.url, "--api-key", "secret")
        assert all("Authorization: Bearer secret" in head for head in server.heads)
        server.heads.clear()
        octavo("complete", "x", "--url", server.url, OCTAVO_API_KEY="first,second")
        assert server.heads
        assert all("Authorization: Bearer first" in head for head in server.heads)


def test_what_a_model_writes_does_not_command_the_terminal() -> None:
    async def colourful(server: FakeServer, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        server.begin(writer)
        server.event(writer, {"choices": [{"index": 0, "text": "\x1b]0;owned\x07fine", "finish_reason": "stop"}]})
        server.end(writer)
        return True

    with FakeServer() as server:
        server.play = colourful
        assert "\x1b]0;owned" in octavo("complete", "x", "--url", server.url).stdout
        status, shown = in_terminal("complete", "x", "--url", server.url, NO_COLOR="1")
    assert status == 0
    assert "\x1b" not in shown
    assert "fine" in shown


# ---------------------------------------------------------------- chat


def test_reasoning_is_shown_and_is_no_part_of_the_answer() -> None:
    bodies: list[dict[str, Any]] = []

    async def thinking(server: FakeServer, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        bodies.append(body)
        server.begin(writer)
        for delta in (
            {"content": ""},
            {"reasoning_content": "Hm, "},
            {"reasoning_content": "so."},
            {"content": "Yes."},
        ):
            server.event(writer, {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        server.event(writer, {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}]})
        server.end(writer)
        return True

    with FakeServer() as server:
        server.play = thinking
        run = octavo("chat", "--url", server.url, stdin="Hello\nAnd?\n")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("Hm, so.\n\nYes.") == 2
    assert bodies[1]["messages"][1] == {"role": "assistant", "content": "Yes."}


def test_a_terminal_wraps_words_and_keeps_what_is_typed_meanwhile() -> None:
    typed = threading.Event()

    async def slow(server: FakeServer, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        server.begin(writer)
        for piece in ("The quick", " brown fox jumps", " over the la", "zy dog and", " runs away."):
            server.event(writer, {"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]})
            await writer.drain()
            while piece == "The quick" and not typed.is_set():
                await asyncio.sleep(0.01)
        server.event(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        server.end(writer)
        return True

    with FakeServer() as server:
        server.play = slow
        terminal = Terminal("chat", "--url", server.url, COLUMNS="20", NO_COLOR="1")
        terminal.wait_for("Ctrl-D leaves.")
        terminal.wait_for("> ")
        terminal.type("Hi\n")
        terminal.wait_for("The")
        terminal.type("/re")
        typed.set()
        answer = terminal.wait_for("away.").replace("\r", "")
        assert answer == " quick brown fox\njumps over the lazy\ndog and runs away."
        terminal.wait_for("> /re")
        terminal.type("s\t")
        terminal.wait_for("set")
        terminal.type("\x15/set te\t")
        terminal.wait_for("temperature")
        terminal.type("\x15\x04")
        assert terminal.end() == 0


def test_a_chat_in_a_pipe(url: str, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    lines = f"Who sings?\n\n/save {saved}\n//slashed\n/reset\nWho sings?\n"
    flags = ("--temperature", "0", "--max-tokens", "8", "--min-tokens", "8", "--stop", "\n")  # a line for each answer
    run = octavo("chat", "--url", url, *flags, stdin=lines)
    assert run.returncode == 0, run.stderr
    first, second, third = run.stdout.splitlines()
    assert first == third
    assert first
    assert second
    talk = json.loads(saved.read_text())
    assert [message["role"] for message in talk["messages"]] == ["user", "assistant"]
    assert talk["messages"][1]["content"] == first
    assert ESCAPE not in run.stdout + run.stderr

    run = octavo(
        "chat", "--url", url, "--temperature", "0", stdin=f"/load {saved}\n/save {saved}\n/nope\n/set top_q 3\n"
    )
    assert run.returncode == 1
    for said in ("Loaded 2 messages", "exists: choose another name", "unknown command /nope", "did you mean top_"):
        assert said in run.stderr
    assert run.stdout == ""


def test_a_long_chat_forgets_its_oldest_turns(url: str) -> None:
    lines = f"{sentences(url, context(url) // 3)}\n" * 4
    run = octavo("chat", "--url", url, "--temperature", "0", "--max-tokens", "16", stdin=lines)
    assert run.returncode == 0, run.stderr
    assert f"the context of {context(url)} tokens is full" in run.stderr
    assert len(run.stdout.splitlines()) >= 4


def test_a_chat_in_a_terminal(url: str) -> None:
    terminal = Terminal(
        "chat", "--url", url, "--temperature", "0", "--max-tokens", "8", "--min-tokens", "8", NO_COLOR="1"
    )
    terminal.wait_for("octavo-demo, at http")
    terminal.wait_for("> ")
    terminal.type("Who sings?\n")
    answer = terminal.wait_for("tokens/s")
    assert "8 tokens, " in answer
    terminal.wait_for("> ")
    terminal.type("/help\n")
    assert "/reset" in terminal.wait_for("Ctrl-D leaves.")
    terminal.wait_for("> ")
    terminal.type("/set temperature 0.5\n")
    terminal.wait_for("temperature = 0.5")
    terminal.wait_for("> ")
    terminal.interrupt("(Ctrl-D or /exit leaves)")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.end() == 0


def test_ctrl_c_stops_an_answer(url: str) -> None:
    terminal = Terminal("chat", "--url", url, "--temperature", "0", TERM="dumb")
    terminal.wait_for("> ")
    terminal.type(f"/set min_tokens {context(url) - 60}\n")
    terminal.wait_for("> ")
    for _ in range(5):  # the answer may be complete before the signal arrives
        terminal.type("Who sings?\n")
        terminal.wait_for("Who sings?")
        terminal.wait_for(" ")
        terminal.wait_for(" ")
        terminal.type("\x03")
        if "(stopped)" in terminal.wait_for("> "):
            break
    else:
        raise AssertionError("no answer was stopped")
    terminal.type("/exit\n")
    assert terminal.end() == 0


def test_colours_in_a_terminal(url: str) -> None:
    terminal = Terminal("chat", "--url", url, "--temperature", "0", "--max-tokens", "8", "--min-tokens", "8")
    terminal.wait_for(ESCAPE)
    terminal.wait_for("> ")
    terminal.type("/exit\n")
    assert terminal.end() == 0


def test_a_chat_loads_the_bundled_model(tmp_path: Path) -> None:
    terminal = Terminal(
        "chat", "--max-tokens", "4", OCTAVO_PORT=str(unused_port()), NO_COLOR="1", OCTAVO_SHOW_PROGRESS="true"
    )
    terminal.wait_for("loading the bundled model")
    assert "Loading 100% of the bundled model" in terminal.wait_for("loaded here. /help")
    terminal.wait_for("> ")
    terminal.type("Who sings?\n")
    terminal.wait_for("tokens/s")
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == 128 + signal.SIGTERM


def test_a_signal_ends_what_waits_for_a_key() -> None:
    """The handler has no chance where the system's own reading goes on after a signal; the thread has."""
    code = (
        "import signal, cli.terminal.ending as ending; ending._GRACE = 0.1; ending.end_with('SIGTERM');"
        "signal.siginterrupt(signal.SIGTERM, False); signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]);"
        "import ctypes, os, threading; threading.Thread(target=lambda: os.kill(os.getpid(), signal.SIGTERM)).start();"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM]); ctypes.CDLL(None).sleep(600)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=PATIENCE, check=False)
    assert ran.returncode == 128 + signal.SIGTERM
