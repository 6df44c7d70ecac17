"""API keys: their roles, the file that lists them, and the set of currently valid keys."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from engine import ADAPTER_NAME, ConfigError
from server.config.settings import ServerSettings

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_COUNT = re.compile(r"[1-9][0-9]{0,8}")
_TENANT = 16  # hexadecimal digits


class Role(StrEnum):
    """The kind of paths that a key opens; `server.door.auth` lists them."""

    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its text: only the digest is kept."""

    digest: bytes = field(repr=False)  # the key's SHA-256
    roles: frozenset[Role] = frozenset(Role)
    name: str | None = None  # the name in the log; None if the file gives none
    requests_per_minute: int | None = None  # maximum requests per minute; None for no limit
    max_concurrency: int | None = None  # maximum concurrent requests; None for no limit
    models: frozenset[str] | None = None  # names of the models that it may use; None for all

    def may_use(self, model: str) -> bool:
        """Whether requests with this key may use this model."""
        return self.models is None or model in self.models

    @classmethod
    def of(cls, key: str, **words: Any) -> ApiKey:
        """The key with these attributes."""
        return cls(digest_of(key.encode()), **words)

    @property
    def tenant(self) -> str:
        """The key's identifier elsewhere: a part of its digest."""
        return self.digest.hex()[:_TENANT]


def digest_of(key: bytes) -> bytes:
    """SHA-256: all digests have one length, so the time of a comparison does not depend on the key's length."""
    return hashlib.sha256(key).digest()


class KeyRing:
    """The currently valid keys; without any, the service is open. `keys`: the keys, all with different digests."""

    def __init__(self, keys: Iterable[ApiKey] = ()):
        self._keys = tuple(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        self._keys = tuple(keys)

    def find(self, given: bytes) -> ApiKey | None:
        """The matching key, if the given text is a valid key."""
        digest, found = digest_of(given), None
        for key in self._keys:  # compare all: the time must not reveal a similar key
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def read_api_keys(settings: ServerSettings) -> tuple[ApiKey, ...]:
    """The keys from the settings, which have all roles, and those from the key file. Raises ConfigError if the file
    cannot be read, contains no key, or has an invalid line. The message never contains a key or text that might be
    one."""
    limits = {"requests_per_minute": settings.key_requests_per_minute, "max_concurrency": settings.key_max_concurrency}
    keys = {digest_of(key.encode()): ApiKey.of(key, **limits) for key in settings.api_key}  # checked there
    if settings.api_key_file is not None:
        origins = dict.fromkeys(keys, "in api_key")
        _read_file(settings.api_key_file, limits, keys, origins)
    return tuple(keys.values())


def _read_file(
    name: str, limits: Mapping[str, int | None], keys: dict[bytes, ApiKey], origins: dict[bytes, str]
) -> None:
    where = f"api_key_file ({name})"
    try:
        text = Path(name).expanduser().read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise ConfigError(f"{where} cannot be read: {problem.strerror or problem}.") from problem
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{where} is not UTF-8 text.") from problem
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
    if not lines:
        raise ConfigError(f"{where} has no keys. Write one key per line, or remove --api-key-file.")
    for number, line in lines:
        try:
            key = _parse(line, limits)
        except ConfigError as problem:
            raise ConfigError(f"{where}, line {number}: {problem}") from None
        if keys.setdefault(key.digest, key) != key:
            before = origins[key.digest]
            raise ConfigError(
                f"{where}, line {number}: the same key is {before} with other options. Remove one of them."
            )
        origins.setdefault(key.digest, f"on line {number}")


def _parse(line: str, limits: Mapping[str, int | None]) -> ApiKey:
    given, *words = line.split()
    if not given.isascii() or not given.isprintable():
        raise ConfigError("the key must consist of printable ASCII characters without spaces.")
    if given.partition("=")[0] in _WORDS:
        raise ConfigError(f"it begins with {given.partition('=')[0]}=, but the key must come first.")
    values: dict[str, Any] = {}
    for number, word in enumerate(words, 2):
        name, equals, value = word.partition("=")
        if not equals or name not in _WORDS:
            # It may be a part of the key.
            raise ConfigError(
                f"word {number} is unknown; after a key, only {', '.join(_WORDS)} are allowed (each with =)."
            )
        attribute, read, allowed = _WORDS[name]
        if attribute in values:
            raise ConfigError(f"{name}= is given twice.")
        try:
            values[attribute] = read(value)
        except ValueError:
            raise ConfigError(f"{name}= must be {allowed}.") from None
    return replace(ApiKey.of(given, **limits), **values)


def _read_roles(value: str) -> frozenset[Role]:
    return frozenset(Role(name) for name in value.split(","))


def _read_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError
    return value


def _read_models(value: str) -> frozenset[str]:
    names = value.split(",")
    if not all(ADAPTER_NAME.fullmatch(name) for name in names):
        raise ValueError
    return frozenset(names)


def _read_count(value: str) -> int | None:
    if value == "none":
        return None
    if not _COUNT.fullmatch(value):
        raise ValueError
    return int(value)


_A_COUNT = "an integer from 1 to 999999999, or none for no limit"
# Options after a key: the attribute, the parser of its value, and a description of valid values.
_WORDS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "role": ("roles", _read_roles, f"some of {', '.join(Role)}, separated by commas"),
    "name": ("name", _read_name, "1 to 64 characters of A-Z a-z 0-9 . _ -"),
    "rpm": ("requests_per_minute", _read_count, _A_COUNT),
    "concurrency": ("max_concurrency", _read_count, _A_COUNT),
    "models": ("models", _read_models, "names of models, separated by commas"),
}
