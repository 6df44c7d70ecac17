"""Hooks of MkDocs beside mkdocs.yml: pages that are not in docs/, and links that lead out of it.

The home page is README.md; CONTRIBUTING.md and others are pages, too, and one is written from the server's OpenAPI
document. Links between all these are made to fit. A link to a file of the source becomes its name.
"""

from __future__ import annotations

import asyncio
import posixpath
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from openapi_page import render  # noqa: E402

# Pages of the site that are no files in docs/, and where they are.
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changes.md": "CHANGELOG.md",
    "examples.md": "examples/README.md",
    "benchmarks.md": "benchmarks/README.md",
    "demo-chat.md": "server/demo/chat/README.md",
    "demo-seq2seq.md": "server/demo/seq2seq/README.md",
}
IMAGES = {
    "images/octavo.svg": "server/playground/octavo.svg",
    "images/cpu.png": "benchmarks/results/cpu.png",
    "images/training-chat.svg": "server/demo/chat/training.svg",
    "images/training-seq2seq.svg": "server/demo/seq2seq/training.svg",
}
API = "http-api.md"
_SITE = {source: name for name, source in (PAGES | IMAGES).items()}
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add what is not in docs/."""
    for name, source in (PAGES | IMAGES).items():
        content: Any = (ROOT / source).read_bytes()
        files.append(File.generated(config, name, content=content.decode() if name.endswith(".md") else content))
    files.append(File.generated(config, API, content=render(openapi())))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Make a page's links fit."""
    return fitted(markdown, page.file.src_uri)


def fitted(markdown: str, name: str) -> str:
    """A page's text with links as the site has them.

    Args:
        name: of the page, in the site.
    """
    source = PAGES.get(name, f"docs/{name}")
    link: Callable[[re.Match[str]], str] = lambda found: _fitted(found, source, name)  # noqa: E731
    return "".join(part if at % 2 else _LINK.sub(link, part) for at, part in enumerate(_CODE.split(markdown)))


def _fitted(found: re.Match[str], source: str, name: str) -> str:
    image, text, target, anchor = found[1], found[2], found[3], found[4] or ""
    if not target or re.match(r"[a-z]+:", target):
        return found[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if path in (".", "benchmarks"):
        path = "README.md" if path == "." else "benchmarks/README.md"
    if path in _SITE:
        path = _SITE[path]
    elif path.startswith("docs/"):
        path = path.removeprefix("docs/")
    else:  # a file of the source
        return text if text.startswith("`") or "/" in text else f"{text} (`{path}`)"
    return f"{image}[{text}]({posixpath.relpath(path, posixpath.dirname(name) or '.')}{anchor})"


def openapi() -> dict[str, Any]:
    """The document of a server of the bundled model."""
    from engine import EngineConfig
    from engine.process.client import start_engine
    from server.app import create_app
    from server.config.settings import DEMO_MODEL

    client = start_engine(EngineConfig(model=str(DEMO_MODEL), show_progress=False))
    try:
        document: dict[str, Any] = create_app(client, None, "octavo-demo").openapi()
    finally:
        asyncio.run(client.close())
    return document
