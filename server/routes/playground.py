"""GET / and its files: a page that talks to this server and shows it at work. The files are served unchanged from the
package."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response

from server.door.pages import HEADERS

FOLDER = Path(__file__).parent.parent / "playground"
PAGE = "index.html"
PREFIX = "/playground/"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Browsers revalidate the files each time, at the cost of a 304, so that a new version of the server never meets an
    # old script.
    "Cache-Control": "no-cache",
    **HEADERS,
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the page."""

    content: bytes  # the bytes of the file
    media_type: str  # their media type
    etag: str  # changes with the content

    @classmethod
    def read(cls, path: Path, changed: Mapping[bytes, bytes] | None = None) -> Asset:
        """Read the file at a path, with some of its text replaced. The file's ending determines the media type."""
        content = path.read_bytes()
        for old, new in (changed or {}).items():
            content = content.replace(old, new)
        return cls(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')

    def answer(self, request: Request) -> Response:
        """The file, or 304 if the client already has it."""
        headers = {**_HEADERS, "ETag": self.etag}
        known = request.headers.get("if-none-match", "")
        if known.strip() == "*" or self.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def asset_names() -> Iterator[str]:
    """The files of the page, including third-party libraries (vendor/)."""
    files = (*FOLDER.iterdir(), *(FOLDER / "vendor").iterdir())
    yield from sorted(path.relative_to(FOLDER).as_posix() for path in files if path.suffix in _TYPES)


def open_paths() -> frozenset[str]:
    """The paths of the page and its files. They need no key: a browser cannot send one before it has the page, and the
    files are the same for everyone."""
    return frozenset({"/", *(PREFIX + name for name in asset_names())})


def make_router(*, feed: bool, key: bool) -> APIRouter:
    """The routes of the page and of each of its files, which are read now.

    Args:
        feed: whether there is a live feed. The page gets this information, so that it requests nothing that would be
            refused; a browser's console shows each refusal as an error.
        key: whether requests need a key; the page gets this information too.
    """
    router = APIRouter(include_in_schema=False)
    for name in asset_names():
        if name != PAGE:
            _add(router, PREFIX + name, Asset.read(FOLDER / name))
    _add(router, "/", Asset.read(FOLDER / PAGE, _told(feed=feed, key=key)))
    return router


def _told(*, feed: bool, key: bool) -> dict[bytes, bytes]:
    changed = {}
    if not feed:
        changed[b'data-feed="on"'] = b'data-feed="off"'
    if key:
        changed[b'data-key="none"'] = b'data-key="needed"'
    return changed


def _add(router: APIRouter, path: str, asset: Asset) -> None:
    async def serve(request: Request) -> Response:
        return asset.answer(request)

    router.add_api_route(path, serve, methods=["GET"])
