"""Asks the service on this machine whether it is ready. Exits with status 0 if so, otherwise with 1 and one line with
the reason.

    python -I -m octavo.cli.healthcheck        what a container's HEALTHCHECK runs
    python -m octavo.cli.healthcheck --port 9000

It finds the service's address as the service itself does: from its flags (given here too, or read from its command line
in /proc), OCTAVO_* variables, the YAML file that these name, or the defaults. It runs every few seconds
beside the service, so it does not load the settings' class. It imports only the standard library, and a YAML reader if
there is such a file.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

SETTINGS = ("host", "port", "uds", "ssl_certfile", "config")
TIMEOUT = 4.0  # seconds; less than the timeout of the container's HEALTHCHECK, so that the reason is reported


@dataclass(frozen=True)
class Address:
    """The address of the service."""

    host: str = "127.0.0.1"  # the host to connect to; loopback if the service listens on all addresses
    port: int = 8000
    uds: str = ""  # path of a Unix socket, used instead of host and port; empty for none
    tls: bool = False  # whether the service uses TLS


def flags(arguments: Sequence[str]) -> dict[str, str]:
    """The SETTINGS in `arguments`, as `--flag value` or `--flag=value`; the last one counts."""
    found: dict[str, str] = {}
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--") or key not in SETTINGS:
            continue
        if equals:
            found[key] = value
        elif index + 1 < len(arguments):
            found[key] = arguments[index + 1]
    return found


def serving_arguments(proc: Path = Path("/proc")) -> list[str]:
    """The arguments of the `octavo serve` process that runs here; none without such a process or without /proc."""
    for folder in sorted((path for path in proc.glob("[0-9]*")), key=lambda path: int(path.name)):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # the process has ended, or belongs to another user
        for index in range(1, len(words)):
            if words[index] == "serve" and Path(words[index - 1]).name == "octavo":
                return words[index + 1 :]
    return []


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The SETTINGS in OCTAVO_* variables; an empty variable counts as unset."""
    found = {name: environ.get(f"OCTAVO_{name.upper()}", "") for name in SETTINGS}
    if "://" in found["port"]:
        found["port"] = ""  # Kubernetes sets this for a Service named octavo; the service ignores it too
    return {name: value for name, value in found.items() if value}


def file_settings(path: str) -> dict[str, str]:
    """The SETTINGS in a YAML file. Raises OSError, ValueError if the file cannot be read, or is not YAML."""
    import yaml

    if not Path(path).expanduser().is_file():  # a pipe can be read only once, and the service has already read it
        raise ValueError(f"{path} is not a file that can be read again: set OCTAVO_PORT, or name the port with --port")
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except yaml.YAMLError as failure:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(failure).split())}") from failure
    if not isinstance(content, dict):
        return {}
    named = {str(key).replace("-", "_"): value for key, value in content.items()}
    return {name: str(named[name]) for name in SETTINGS if named.get(name) is not None}


def find(given: Mapping[str, str], environ: Mapping[str, str]) -> Address:
    """The address from flags, variables and the file, in that order of precedence. Raises OSError if the file cannot be
    read; ValueError if the file is not YAML, or the port is not a number, or is 0 (any free port)."""
    chosen = {**variables(environ), **given}
    if chosen.get("config", "null") != "null":
        chosen = {**file_settings(chosen["config"]), **chosen}
    # The word null resets a setting to its default, despite weaker sources.
    chosen = {name: value for name, value in chosen.items() if value != "null"}
    host, port, uds = chosen.get("host", ""), chosen.get("port", "8000"), chosen.get("uds", "")
    if not uds and not (port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"cannot query port {port!r}: set OCTAVO_PORT to a number from 1 to 65535")
    everywhere = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
    return Address(
        host=everywhere.get(host, host),
        port=0 if uds else int(port),
        uds=os.path.expanduser(uds),
        tls=bool(chosen.get("ssl_certfile")),
    )


def connect(address: Address, timeout: float) -> socket.socket:
    """Connect to the service. The certificate is not verified, because it names the public host, not this machine."""
    if address.uds:
        plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        plain.settimeout(timeout)
        plain.connect(address.uds)
    else:
        plain = socket.create_connection((address.host, address.port), timeout)
    if not address.tls:
        return plain
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(plain)


def ask(address: Address, path: str, *, key: str = "", most: int = 300, timeout: float = TIMEOUT) -> tuple[int, str]:
    """The status and the body of a GET; at most `most` bytes are read. Raises OSError, HTTPException if the service
    cannot be reached, or does not answer in HTTP within `timeout` seconds."""
    # The host is only for the Host header; the connection is already made.
    asked = HTTPConnection("localhost")
    asked.sock = connect(address, timeout)
    try:
        asked.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        answer = asked.getresponse()
        return answer.status, answer.read(most).decode(errors="replace").strip()
    finally:
        asked.close()


def problem(address: Address, timeout: float = TIMEOUT) -> str:
    """The reason why the service is not ready, in one line; empty if it is ready. Raises OSError, HTTPException: see
    `ask`."""
    status, body = ask(address, "/health", timeout=timeout)
    return "" if status == 200 else f"/health answered {status}: {body}"


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Check once; returns the exit status."""
    where = "the settings"
    try:
        address = find(flags(arguments or serving_arguments()), environ)
        where = address.uds or f"{address.host}, port {address.port}"
        reason = problem(address)
    except (OSError, HTTPException, ValueError) as failure:
        reason = f"{where}: {failure or type(failure).__name__}"
    if reason:
        print(f"octavo: not ready: {reason}", file=sys.stderr)
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
