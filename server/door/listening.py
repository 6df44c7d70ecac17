"""The service's sockets: a TCP port or a Unix socket, with or without TLS."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import resource
import socket
import ssl
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from server.config.settings import ServerSettings

_LONGEST_PATH = 103  # maximum bytes of a Unix socket's path; Linux allows 107
_ENOUGH_FILES = 65536


class StartupError(Exception):
    """The service cannot start; the message explains why in one paragraph."""


class Listener:
    """A bound socket that does not listen yet; a context manager that removes everything at the end. Raises
    StartupError if the host is unknown, or the port or path is taken or not permitted. `settings`: host and port, or
    uds, and whether there is a certificate.

    Attributes:
        socket: the socket for the web server, which closes it.
        url: the URL for clients on this machine.
    """

    def __init__(self, settings: ServerSettings):
        self._file: tuple[Path, os.stat_result] | None = None
        if settings.uds is not None:
            path = Path(settings.uds).expanduser().absolute()
            self.socket = bind_path(path)
            self._file = path, path.stat()
            self.url = f"unix:{path}"
        else:
            self.socket = bind(settings.host, settings.port)
            self.url = url(self.socket, tls=settings.ssl_certfile is not None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def is_reachable(self) -> bool:
        """Whether clients can connect: the Unix socket's file exists and is this service's."""
        if self._file is None:
            return True
        path, made = self._file
        try:
            return os.path.samestat(path.stat(), made)
        except OSError:
            return False

    def close(self) -> None:
        """Close the socket and remove its file, unless another service has replaced it; idempotent."""
        self.socket.close()
        if self._file is not None and self.is_reachable():
            with contextlib.suppress(OSError):
                self._file[0].unlink()


def usable_files() -> int:
    """The number of file descriptors that this process can have, at most `_ENOUGH_FILES`; each connection takes one."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    given, possible = (_ENOUGH_FILES if value == resource.RLIM_INFINITY else value for value in (limit, most))
    return max(given, min(possible, _ENOUGH_FILES))


def raise_file_limit() -> None:
    """Raise this process's limit to `usable_files`, because shells and init systems set limits for small programs."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < usable_files():
        with contextlib.suppress(ValueError, OSError):  # the system's limit is lower; the old limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (usable_files(), most))


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket that does not listen yet. Raises StartupError if the host is unknown, or the port is taken or
    not permitted."""
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as problem:
        if listener is not None:
            listener.close()
        reason = (problem.strerror if isinstance(problem, OSError) else None) or problem
        raise StartupError(
            f"cannot listen on {host}, port {port}: {reason}. Choose another address with --host and --port "
            f"(OCTAVO_HOST, OCTAVO_PORT)."
        ) from problem
    return listener


def url(listener: socket.socket, *, tls: bool = False) -> str:
    """The URL of a TCP socket for clients on this machine."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def bind_path(path: Path) -> socket.socket:
    """A bound Unix socket that does not listen yet and that only this user can connect to. The file of a service that
    has ended is replaced. Raises StartupError if the path is too long, taken, or cannot be created."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if len(os.fsencode(path)) > _LONGEST_PATH:
            raise StartupError(
                f"cannot listen on {path}: the path of a socket may have at most {_LONGEST_PATH} bytes, this one has "
                f"{len(os.fsencode(path))}. Choose a shorter one with --uds (OCTAVO_UDS)."
            )
        try:
            _remove_stale(path)
            listener.bind(str(path))
            path.chmod(0o600)  # no client can have connected yet, because it does not listen
        except OSError as problem:
            raise StartupError(
                f"cannot listen on {path}: {problem.strerror or problem}. Choose another path with --uds (OCTAVO_UDS)."
            ) from problem
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartupError(f"cannot listen on {path}: it exists and is not a socket. Choose another path with --uds.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
            taken = True
        except ConnectionRefusedError:
            taken = _is_bound(path)
        except TimeoutError:  # its queue is full
            taken = True
    if taken:
        raise StartupError(
            f"cannot listen on {path}: another process is using it. Stop that process, or choose another path with "
            f"--uds (OCTAVO_UDS)."
        )
    path.unlink()


def _is_bound(path: Path) -> bool:
    """Whether a process has bound the path but does not listen yet, such as a service that is loading its model."""
    try:
        lines = Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()
    except OSError:  # not available on this system
        return False
    return any(line.endswith(f" {path}") for line in lines)


def is_public(settings: ServerSettings) -> bool:
    """Whether other machines may reach the service."""
    if settings.uds is not None:
        return False
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        return not all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)
    except (OSError, ValueError):
        return True


def check_certificate(settings: ServerSettings) -> None:
    """Open the TLS files like the web server. Raises StartupError if a file is missing or unreadable, the files do not
    match, or the password is wrong."""
    if settings.ssl_certfile is None:
        return
    for name in ("ssl_certfile", "ssl_keyfile"):
        path = getattr(settings, name)
        if path is not None:
            try:
                Path(path).read_bytes()
            except OSError as problem:
                raise StartupError(
                    f"cannot read {path}: {problem.strerror or problem}. Correct --{name.replace('_', '-')} "
                    f"(OCTAVO_{name.upper()})."
                ) from problem
    asked = False

    def password() -> str:
        nonlocal asked
        asked = True
        return settings.ssl_keyfile_password or ""

    files = " and ".join(path for path in (settings.ssl_certfile, settings.ssl_keyfile) if path is not None)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password)
    except (ssl.SSLError, ValueError) as problem:
        raise StartupError(f"HTTPS cannot be served with {files}: {_reason(problem, asked, settings)}") from problem


def _reason(problem: Exception, asked: bool, settings: ServerSettings) -> str:
    if asked:
        if settings.ssl_keyfile_password is None:
            return "the private key is encrypted. Give --ssl-keyfile-password (OCTAVO_SSL_KEYFILE_PASSWORD)."
        return "the password does not open the private key. Correct --ssl-keyfile-password."
    if getattr(problem, "reason", None) == "KEY_VALUES_MISMATCH":
        return "the private key does not belong to the certificate. Correct --ssl-keyfile or --ssl-certfile."
    fix = "name the key's file with --ssl-keyfile" if settings.ssl_keyfile is None else "correct --ssl-keyfile"
    return f"a certificate and its private key in PEM form are needed. Correct --ssl-certfile, or {fix}."
