"""The documentation's site: what is made for it, and that readers' browsers ask no other site."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_client import FakeClient, byte_tokenizer
from support.service import ROOT
from test_setup_script import load

from server.app import create_app

FETCHED = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(\S+?)[\"'\s>]|<link[^>]*\shref=[\"']?([^\"'\s>]+)"
)


def test_every_endpoint_and_shape_is_on_the_page_of_the_api() -> None:
    document = create_app(FakeClient(lambda *_: []), byte_tokenizer(), "m").openapi()
    page = load("openapi_page").render(document)
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"\n### {method.upper()} {path}\n" in page
    shapes = document["components"]["schemas"]
    for name, shape in shapes.items():
        (section,) = re.findall(rf"\n### {name}\n(.*?)(?=\n###? |\Z)", page, re.DOTALL)
        assert all(f"| `{field}`" in section for field in shape.get("properties", {}))
    linked = set(re.findall(r"\]\(#([^)]+)\)", page))
    assert linked <= {name.lower() for name in shapes}
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 200
    assert {line.count(" | ") for line in rows} <= {2, 3}


def test_links_fit_the_site() -> None:
    pytest.importorskip("mkdocs", reason="python3 tools/setup.py docs-site installs it")
    fitted = load("site_hooks").fitted
    assert fitted("[a](docs/api.md#fields) `[b](docs/x.md)`", "index.md") == "[a](api.md#fields) `[b](docs/x.md)`"
    assert fitted("[a](../../CONTRIBUTING.md) [b](../api.md)", "tutorials/agent.md") == (
        "[a](../contributing.md) [b](../api.md)"
    )
    assert fitted("[tools](../examples/tools.py)", "tour.md") == "tools (`examples/tools.py`)"
    assert fitted("![a](benchmarks/results/cpu.png) [b](https://x.org)", "index.md") == (
        "![a](images/cpu.png) [b](https://x.org)"
    )


@pytest.mark.slow
def test_the_site_is_built_and_asks_no_other(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="python3 tools/setup.py docs-site installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 35
    for page in pages:
        for source, link in FETCHED.findall(page.read_text(encoding="utf-8")):
            assert not re.match(r"(https?:)?//", source or link), page.name
    assert "rerank" in (tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8")
