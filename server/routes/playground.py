"""GET / and its parts: a page that talks to this server and shows it at work. Plain files, as the package has them."""

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
    # Asked again each time, which costs a 304: a new version of the server never meets an old script.
    "Cache-Control": "no-cache",
    **HEADERS,
}


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of the page.

    Attributes:
        content: its bytes.
        media_type: what they are.
        etag: changes with them.
    """

    content: bytes
    media_type: str
    etag: str

    @classmethod
    def read(cls, path: Path, changed: Mapping[bytes, bytes] | None = None) -> Asset:
        """The file at a path, with some of its text replaced. Its ending determines the media type."""
        content = path.read_bytes()
        for old, new in (changed or {}).items():
            content = content.replace(old, new)
        return cls(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')

    def answer(self, request: Request) -> Response:
        """The file, or 304 for a client that has it."""
        headers = {**_HEADERS, "ETag": self.etag}
        known = request.headers.get("if-none-match", "")
        if known.strip() == "*" or self.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def asset_names() -> Iterator[str]:
    """The files that the page is made of, those of other people's libraries (vendor/) included."""
    files = (*FOLDER.iterdir(), *(FOLDER / "vendor").iterdir())
    yield from sorted(path.relative_to(FOLDER).as_posix() for path in files if path.suffix in _TYPES)


def open_paths() -> frozenset[str]:
    """The paths of the page and its parts. They need no key: a browser cannot send one before it has the page, and
    there is nothing in them that the package does not hold."""
    return frozenset({"/", *(PREFIX + name for name in asset_names())})


def make_router(*, feed: bool, key: bool) -> APIRouter:
    """The routes of the page and of each of its parts, whose files are read now.

    Args:
        feed: there is a live feed. The page is told, and does not ask for what would be refused: a browser's console
            shows each refusal as an error.
        key: requests need a key; the page is told so, too.
    """
    router = APIRouter(include_in_schema=False)
    for name in asset_names():
        if name != PAGE:
            _add(router, PREFIX + name, Asset.read(FOLDER / name))
    _add(router, "/", Asset.read(FOLDER / PAGE, _told(feed=feed, key=key)))
    return router


def _told(*, feed: bool, key: bool) -> dict[bytes, bytes]:
    """The page with the facts of a server that differ from the file."""
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
