"""The page at /: how its files are served, to whom, and that they refer to nothing that is not there."""

from __future__ import annotations

import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_client import FakeClient, byte_tokenizer, say
from support.asgi import request

from server.app import create_app
from server.config.settings import ServerSettings
from server.routes.playground import FOLDER, PAGE, PREFIX, asset_names
from server.serving import uvicorn_config

KEY = "sk-playground"
NAMES = list(asset_names())
OURS = [name for name in NAMES if not name.startswith("vendor/")]
PATHS = ["/", *(PREFIX + name for name in NAMES if name != PAGE)]


class Site:
    """An app, called in process."""

    def __init__(self, **chosen: Any):
        self.settings = ServerSettings(**chosen)
        client = FakeClient(lambda name, source, params: say(name, ["hi"], params))
        self.app = create_app(client, byte_tokenizer(), "m", settings=self.settings)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return request(uvicorn_config(self.app, self.settings).app, method, path, strict=True, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)


@pytest.mark.parametrize("path", PATHS)
def test_every_file_is_served_closed_against_others_and_asked_again_each_time(path: str) -> None:
    site = Site()
    answer = site.get(path)
    assert answer.status_code == 200
    assert answer.content == (FOLDER / (path.removeprefix(PREFIX) if path != "/" else PAGE)).read_bytes()
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    tag = answer.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = site.get(path, headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert site.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
    head = site.request("HEAD", path)
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", tag)
    assert site.request("POST", path).status_code == 405


def test_types() -> None:
    site = Site()
    kinds = {Path(path).suffix: site.get(path).headers["content-type"] for path in PATHS}
    assert kinds == {
        "": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
    }  # fmt: skip


def test_the_page_needs_no_key_and_what_it_asks_for_does() -> None:
    site = Site(api_key=(KEY,))
    assert [site.get(path).status_code for path in PATHS] == [200] * len(PATHS)
    for path in ("/v1/models", "/openapi.json", "/playground/live", "/playground", "/playground/none.js"):
        assert site.get(path).status_code == 401
    assert KEY not in "".join(site.get(path).text for path in PATHS)


def test_a_setting_takes_it_away() -> None:
    site = Site(enable_playground=False)
    assert [site.get(path).status_code for path in PATHS[1:]] == [404] * len(PATHS[1:])
    assert site.get("/").text == "Ollama is running", "what Ollama's clients look for"
    closed = Site(enable_playground=False, api_key=(KEY,))
    assert [closed.get(path).status_code for path in PATHS] == [401] * len(PATHS)


def test_the_page_is_told_what_would_be_refused() -> None:
    usual = Site().get("/")
    for chosen, told in (
        ({"enable_cache_map": False}, b'data-feed="off"'),
        ({"api_key": (KEY,)}, b'data-key="needed"'),
    ):
        page = Site(**chosen).get("/")
        assert told in page.content
        assert told not in usual.content
        assert page.headers["etag"] != usual.headers["etag"]
    assert b'<body data-feed="on" data-key="none">' in usual.content


def test_under_a_prefix() -> None:
    """Whether the proxy strips it or not; all that the page refers to is relative to where it is."""
    site = Site(root_path="/llm")
    assert site.get("/llm/").content == site.get("/").content == (FOLDER / PAGE).read_bytes()
    assert site.get("/llm/playground/main.js").status_code == 200


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.found += [value for name in ("src", "href") if (value := given.get(name)) is not None]
        self.inline += [name for name in given if name.startswith("on") or name == "style"]
        self.inline += [tag] if tag == "style" or (tag == "script" and "src" not in given) else []


def test_the_page_refers_to_its_own_files_only() -> None:
    links = _Links()
    links.feed((FOLDER / PAGE).read_text(encoding="utf-8"))
    assert not links.inline, "the policy forbids what is written into the page"
    ours = {link.removeprefix("playground/") for link in links.found if link.startswith("playground/")}
    assert ours <= set(NAMES)
    assert {link for link in links.found if not link.startswith(("playground/", "#"))} == {"docs", "metrics"}


def test_the_scripts_import_each_other_and_all_are_used() -> None:
    scripts = {name: (FOLDER / name).read_text(encoding="utf-8") for name in OURS if name.endswith(".js")}
    imports = {name: set(re.findall(r'(?:from |import\()"\./([^"]+)"', text)) for name, text in scripts.items()}
    assert set().union(*imports.values()) == {name for name in NAMES if name.endswith(".js")} - {"main.js"}
    for name, text in scripts.items():
        assert len(text.splitlines()) <= 200, name
        assert all(len(line) <= 160 for line in text.splitlines()), name
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage"):
            assert word not in text, f"{name} uses {word}"


@pytest.mark.parametrize("name", OURS)
def test_no_file_names_another_place(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s\"')]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert not re.search(r"(?<![a-z])url\(", text)


def test_libraries_are_those_that_the_list_names_with_their_licences() -> None:
    folder = FOLDER / "vendor"
    listed = re.findall(r"^\| (\S+\.js) \| (\S+) .* \| (\w{64}) \|$", (folder / "README.md").read_text(), re.MULTILINE)
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.js")}
    assert {name: digest for name, _, digest in listed} == found
    assert sum(path.stat().st_size for path in folder.glob("*.js")) < 350_000
    licences = (folder / "LICENSES.txt").read_text(encoding="utf-8")
    assert all(f"==== {name.removesuffix('.js')}" in licences for name in found)


def test_what_the_forms_leave_out_exists() -> None:
    """A parameter that is renamed must not come to stand in the form beside what the page fills in itself."""
    text = (FOLDER / "schema.js").read_text(encoding="utf-8")
    own = set(re.findall(r'"(\w+)"', text[text.index("const OWN") : text.index("]);")]))
    schemas = Site().app.openapi()["components"]["schemas"]
    known = {name for body in ("CompletionRequest", "ChatCompletionRequest") for name in schemas[body]["properties"]}
    assert own <= known
    groups = (FOLDER / "parameters.js").read_text(encoding="utf-8")
    named = set(
        re.findall(r'"([a-z_]+)"', groups[groups.index("const GROUPS") : groups.index("// What a preset sets")])
    )
    assert named <= known - own
