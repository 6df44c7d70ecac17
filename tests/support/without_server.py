"""`pytest --without-server`: what runs where only the packages of the engine's core are installed, as beside a GPU that
is lent.

Tests that need the server's packages, or those that only tests need, are skipped where these are missing. Without the
option a missing package is an error, so that no test is lost unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

import pytest

# Import names of what `pyproject.toml` lists beyond the packages of the engine's core.
PACKAGES = {
    "fastapi",
    "fastapi_offline",
    "google",
    "httptools",
    "httpx",
    "jinja2",
    "jsonschema_rs",
    "llguidance",
    "matplotlib",
    "msgspec",
    "openai",
    "prometheus_client",
    "promql_parser",
    "pydantic",
    "pydantic_settings",
    "rich",
    "schemathesis",
    "scipy",
    "sentencepiece",
    "starlette",
    "structlog",
    "uvicorn",
    "uvloop",
    "zmq",
}
_MISSING = re.compile(r"ModuleNotFoundError: (?:No module named|import of) '?(\w+)")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-server",
        action="store_true",
        help="skip tests whose packages are missing, of those that the engine's core does without",
    )


def missing_package(text: str) -> str | None:
    """The package for want of which something failed, if the engine's core does without it."""
    found = [name for name in _MISSING.findall(text) if name in PACKAGES]
    return found[-1] if found else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _without(collector, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _without(item, (yield))


def _without(node: pytest.Item | pytest.Collector, report: Any) -> Any:
    """The report, or that of something skipped where a package is missing."""
    if report.failed and node.config.getoption("--without-server"):
        name = missing_package(str(report.longrepr))
        if name is not None:
            report.outcome = "skipped"
            report.longrepr = (str(node.path), 0, f"Skipped: needs {name}")
    return report
