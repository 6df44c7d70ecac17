"""An app over a scripted engine, asked by the clients that people use, in process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import anthropic
import httpx
import httpx2
import openai
from fake_client import FakeClient, Script, hf_byte_tokenizer, say

from engine.text.processor import Tokenizer
from server.app import create_app
from server.config.settings import ServerSettings

T = TypeVar("T")

# Writes all that a conversation holds, so that tests read it off the prompt.
TEMPLATE = (
    "{% for t in tools or [] %}tool:{{ t.function.name }};{% endfor %}"
    "{% if reasoning_effort %}effort:{{ reasoning_effort }};{% endif %}"
    "{% if enable_thinking is defined %}think:{{ enable_thinking }};{% endif %}"
    "{% for m in messages %}{{ m.role }}:"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "think"}
WEATHER_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT_AND_CALLS = f"<think>It is about weather.</think>Let me look.\n{CALL}\n{CALL.replace('Oslo', 'Rome')}"


def saying(*texts: str, finish: str = "stop") -> Script:
    """A script whose n-th request is answered with the n-th text, all further ones with the last."""
    left = list(texts)

    def script(request_id: str, source: Any, params: Any) -> Any:
        text = left.pop(0) if len(left) > 1 else left[0]
        return say(request_id, [text + ("\0" if finish == "stop" else "")], params, finish)

    return script


class Conversing:
    """The app, and what was asked of its engine.

    Args:
        script: what the engine answers.
        settings: of the service.
    """

    def __init__(self, script: Script, *, template: str | None = TEMPLATE, **settings: Any):
        self.client = FakeClient(script)
        self.client.info = replace(self.client.info, max_model_len=4096, num_blocks=600)
        hf = hf_byte_tokenizer()
        hf.chat_template = template
        self._tokenizer = Tokenizer(hf)
        self._settings = settings
        self.start()

    def start(self) -> None:
        """The service anew, with the files that it had."""
        self.app = create_app(self.client, self._tokenizer, "org/fake", settings=ServerSettings(**self._settings))
        self.service = self.app.state.service

    def run(self, call: Callable[[Conversing], Coroutine[Any, Any, T]]) -> T:
        """What the call gives, within the app's life."""

        async def within() -> T:
            async with self.app.router.lifespan_context(self.app):
                return await call(self)

        return asyncio.run(asyncio.wait_for(within(), 60))

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        """The answer to a request."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.request(method, path, json=body, headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """The answer to one request, in a life of the app of its own."""
        return self.run(lambda api: api.ask("POST", path, body, **headers))

    def events(self, path: str, body: Any) -> list[tuple[str, dict[str, Any]]]:
        """The typed events of a streamed answer; the names in front of them are those within."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return read_events(answer.text)

    def openai(self, key: str = "none") -> openai.AsyncOpenAI:
        """OpenAI's client of this app."""
        return openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key=key, max_retries=0, http_client=self._http(openai.AsyncOpenAI)
        )

    def anthropic(self, key: str = "none") -> anthropic.AsyncAnthropic:
        """Anthropic's client of this app."""
        return anthropic.AsyncAnthropic(
            base_url="http://localhost", api_key=key, max_retries=0, http_client=self._http(anthropic.AsyncAnthropic)
        )

    def _http(self, client: Any) -> Any:
        return httpx2.AsyncClient(transport=httpx2.ASGITransport(self.app, raise_app_exceptions=False))

    @property
    def prompts(self) -> list[str]:
        """What the engine was asked, in order."""
        return [source.text or "" for source, _ in self.client.asked.values()]

    @property
    def params(self) -> Any:
        """The sampling parameters of the last request."""
        return list(self.client.asked.values())[-1][1]


def read_events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Events by name and data."""
    events = []
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    for block in blocks:
        if block.startswith(":"):
            continue
        name, _, data = block.partition("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in events)
    return events


def kinds(events: Sequence[tuple[str, Any]]) -> list[str]:
    """The events' names, those that repeat once."""
    return [name for index, (name, _) in enumerate(events) if not index or events[index - 1][0] != name]


def file_in(folder: Path) -> str:
    """The path of a store."""
    return str(folder / "responses.db")
