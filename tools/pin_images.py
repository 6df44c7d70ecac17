#!/usr/bin/env python3
"""Pins the images that Octavo's container files name to what their tags are now: IMAGE:TAG becomes IMAGE:TAG@sha256:...

    python3 tools/pin_images.py            asks the registries, and writes the digests into the files
    python3 tools/pin_images.py --check    changes nothing; ends with 1 where a digest is missing or has changed

With the standard library alone, by the HTTP API of registries (OCI's distribution specification), without an account.
Registries named by OCTAVO_INSECURE_REGISTRIES (commas between them) are asked over plain HTTP.
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ("Dockerfile", "docker-compose.yml", "docker-compose.gpu.yml")
_DIGEST = r"sha256:[0-9a-f]{64}"
# What stands after `image:` in a compose file, or in the Dockerfile's ARG ..._IMAGE=; Octavo's own is built here.
_PINNED = re.compile(
    r"(?P<before>^[ \t]*(?:image:[ \t]*|ARG \w*IMAGE=))(?P<image>(?!octavo:)[\w./:-]+:[\w.-]+)"
    rf"(?:@(?P<digest>{_DIGEST}))?[ \t]*$",
    re.MULTILINE,
)
_ACCEPT = ", ".join(
    [
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    ]
)
_SECONDS = 30.0


class RegistryError(Exception):
    """A registry did not tell a digest."""


@dataclass(frozen=True)
class Image:
    """The place of a tag.

    Attributes:
        registry: its host, with a port where it has one.
        name: of the repository, such as library/python.
    """

    registry: str
    name: str
    tag: str

    @classmethod
    def parse(cls, text: str) -> Image:
        """As Docker reads it: python:3.12 is docker.io/library/python:3.12."""
        path, _, tag = text.rpartition(":")
        first, slash, rest = path.partition("/")
        if slash and ("." in first or ":" in first or first == "localhost"):
            return cls(first, rest, tag)
        return cls("registry-1.docker.io", path if slash else f"library/{path}", tag)


def images_in(text: str) -> dict[str, str | None]:
    """The images that a file names, and the digests that they are pinned to."""
    return {match["image"]: match["digest"] for match in _PINNED.finditer(text)}


def pinned(text: str, digests: dict[str, str]) -> str:
    """The file with these digests."""
    return _PINNED.sub(lambda match: f"{match['before']}{match['image']}@{digests[match['image']]}", text)


def current_digest(image: Image) -> str:
    """The tag's current digest: that of its index, which holds all platforms, if it has one.

    Raises:
        RegistryError: the registry cannot be reached, has no such tag, or wants an account.
    """
    insecure = os.environ.get("OCTAVO_INSECURE_REGISTRIES", "").split(",")
    scheme = "http" if image.registry in insecure else "https"
    url = f"{scheme}://{image.registry}/v2/{image.name}/manifests/{image.tag}"
    try:
        status, headers = _head(url, {})
        if status == 401:
            status, headers = _head(url, {"Authorization": f"Bearer {_token(headers, image)}"})
    except (OSError, ValueError) as problem:
        raise RegistryError(f"{url}: {problem}") from problem
    digest = headers.get("Docker-Content-Digest", "")
    if status != 200 or not re.fullmatch(_DIGEST, digest):
        raise RegistryError(f"{url}: status {status}, digest {digest!r}")
    return digest


def _head(url: str, headers: dict[str, str]) -> tuple[int, Message]:
    asked = urllib.request.Request(url, method="HEAD", headers={"Accept": _ACCEPT, **headers})
    try:
        with urllib.request.urlopen(asked, timeout=_SECONDS) as answer:
            return answer.status, answer.headers
    except urllib.error.HTTPError as problem:
        with problem:
            return problem.code, problem.headers


def _token(headers: Message, image: Image) -> str:
    """The token for reading that the registry's answer says where to get."""
    challenge = dict(re.findall(r'(\w+)="([^"]*)"', headers.get("WWW-Authenticate", "")))
    if "realm" not in challenge:
        raise ValueError("it wants an account, and does not say where a token for reading is to be had")
    wanted = {
        "scope": f"repository:{image.name}:pull",
        **{key: challenge[key] for key in ("service",) if key in challenge},
    }
    with urllib.request.urlopen(f"{challenge['realm']}?{urllib.parse.urlencode(wanted)}", timeout=_SECONDS) as answer:
        given = json.load(answer)
    return str(given.get("token") or given.get("access_token"))


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    if list(arguments) not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    status = 0
    for name in FILES:
        path = root / name
        text = path.read_text(encoding="utf-8")
        found = images_in(text)
        try:
            digests = {image: current_digest(Image.parse(image)) for image in found}
        except RegistryError as problem:
            print(f"pin_images: {problem}", file=sys.stderr)
            return 1
        for image, digest in digests.items():
            if digest != found[image]:
                print(f"{name}: {image} was {found[image] or 'not pinned'}, is {digest}")
                status = 1 if arguments else 0
        if not arguments:
            path.write_text(pinned(text, digests), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
