"""What README and docs/tour.md show is what one gets: their requests and scripts, one after the other, on the bundled
models. Links lead somewhere, and the reference of the API names every field."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.doc_pages import blocks
from support.service import ROOT, Service

from server import api, routes
from server.api.base import JsonBody

SHOWN = (ROOT / "README.md", ROOT / "docs" / "tour.md")
REQUEST = re.compile(
    r"^\$ curl (?:-N )?(http://127\.0\.0\.1:8000(/\S+))[^\n]*\\\n    -d '(\{.*?\})'\n(.*?)(?=^\$ |\Z)", re.M | re.S
)
SEQ2SEQ = "octavo serve --demo seq2seq"
OTHER_MODEL = "octavo serve --served-model-name"  # which has to be downloaded

Serve = Callable[..., str]


@pytest.fixture
def serve(bundled: Callable[..., Service]) -> Serve:
    """Gives the URL of a bundled model's server."""
    return lambda *flags: bundled(*flags).url


def shown_blocks() -> list[tuple[str, str]]:
    """Language and text of each block; those of another model left out."""
    found: list[tuple[str, str]] = []
    text = "".join(page.read_text(encoding="utf-8") for page in SHOWN)
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        inside = blocks(section)
        cut = next((i for i, (_, text) in enumerate(inside) if OTHER_MODEL in text), len(inside))
        found += inside[:cut]
    return found


def shown_requests() -> list[tuple[bool, str, dict[str, Any], str]]:
    """Whether it is for the encoder-decoder, the path, the body, and what the page says comes back."""
    return [
        (SEQ2SEQ in text, match[2], json.loads(match[3]), match[4].strip())
        for language, text in shown_blocks()
        if language == "console"
        for match in REQUEST.finditer(text)
    ]


def told(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what is another one each time."""
    kept = {key: value for key, value in answer.items() if key not in ("id", "created", "system_fingerprint")}
    if "usage" in kept:  # what was in the cache depends on what had been asked before
        kept["usage"] = {key: value for key, value in kept["usage"].items() if key != "prompt_tokens_details"}
    for choice in kept.get("choices", ()):
        if "score" in choice:  # its last digits are the machine's
            choice["score"] = round(choice["score"], 3)
    return kept


def streamed(text: str) -> tuple[str, str, str]:
    """Text, reason of the end and last line of a stream; how it is cut into events is a matter of time."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"], lines[-1]


def whole(printed: str) -> str:
    """What was printed, without the marks between the events of a stream."""
    return printed.replace("|", "").strip()


@pytest.mark.slow
def test_requests(serve: Serve) -> None:
    compared = 0
    for other, path, body, shown in shown_requests():
        url = serve("--demo", "seq2seq") if other else serve()
        answer = httpx.post(url + path, json=body, timeout=200)
        assert answer.status_code == 200, answer.text
        if not shown:
            continue
        if body.get("stream"):
            assert streamed(answer.text) == streamed(shown)
        else:
            assert told(answer.json()) == told(json.loads(shown))
        compared += 1
    assert compared >= 5


def test_scripts(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts of Python share their names, as in one session; what follows them is what they print."""
    monkeypatch.chdir(ROOT)
    everything, names, compared = shown_blocks(), {}, 0
    for at, (language, script) in enumerate(everything):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(script.replace("http://127.0.0.1:8000", serve()), names)
        follows, expected = everything[at + 1]
        assert follows == ""
        assert whole(printed.getvalue()) == whole(expected)
        compared += 1
    assert compared >= 4


PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)


def anchors(page: Path) -> set[str]:
    """Where links into a page may lead, as GitHub and the documentation's site name headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    words = (
        re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    )
    return {heading.replace(" ", "-") for heading in words}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not re.match(r"[a-z]+:", link) and not (target.exists() and (not anchor or anchor in anchors(target))):
            broken.append(link)
    assert broken == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 180


def test_the_reference_names_every_field_of_a_request() -> None:
    pages = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("api.md", "structured-output.md")]
    modules = [
        importlib.import_module(f"{package.__name__}.{found.name}")
        for package in (api, routes)
        for found in pkgutil.iter_modules(package.__path__)
    ]
    bodies = {
        one
        for module in modules
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, JsonBody)
    } - {JsonBody}
    assert len(bodies) > 8
    for body in bodies:
        names = [info.alias or name for name, info in body.model_fields.items()]
        missing = [name for name in names if not any(re.search(rf"\b{name}\b", page) for page in pages)]
        assert not missing, body.__name__
