"""Asks the service on this machine whether it is ready: status 0 if so, else 1 with one line that says why not.

    python -I -m octavo.cli.healthcheck        what a container's HEALTHCHECK runs
    python -m octavo.cli.healthcheck --port 9000

The address of the service is found in the same way as by the service itself: its flags (given here too, or else read
from its own command line in /proc), OCTAVO_* variables, the YAML file that these name, the defaults. The settings' own
class is not used, nor anything beyond the standard library but for that file: this runs every few seconds beside the
service.
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
TIMEOUT = 4.0  # seconds; below the timeout of the container's HEALTHCHECK, so that the reason is told


@dataclass(frozen=True)
class Address:
    """The address to ask.

    Attributes:
        host: to connect to; a service that listens on all addresses is asked on loopback.
        uds: path of a Unix socket, which takes the place of host and port; empty for none.
        tls: whether the service speaks TLS.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str = ""
    tls: bool = False


def flags(arguments: Sequence[str]) -> dict[str, str]:
    """The SETTINGS among `arguments`, as `--flag value` or `--flag=value`; the last one counts."""
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
    """The arguments of the `octavo serve` that runs here; none where there is no such process or no /proc."""
    for folder in sorted((path for path in proc.glob("[0-9]*")), key=lambda path: int(path.name)):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # ended in the meantime, or not ours to see
        for index in range(1, len(words)):
            if words[index] == "serve" and Path(words[index - 1]).name == "octavo":
                return words[index + 1 :]
    return []


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The SETTINGS that OCTAVO_* variables set; an empty one counts as not set."""
    found = {name: environ.get(f"OCTAVO_{name.upper()}", "") for name in SETTINGS}
    if "://" in found["port"]:
        found["port"] = ""  # Kubernetes' word about a Service called octavo; the service ignores it, too
    return {name: value for name, value in found.items() if value}


def file_settings(path: str) -> dict[str, str]:
    """The SETTINGS that a YAML file sets.

    Raises:
        OSError, ValueError: it cannot be read, or is not YAML.
    """
    import yaml

    if not Path(path).expanduser().is_file():  # a pipe can be read once, and the service has done that
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
    """The address that flags, variables and the file lead to, in that order of strength.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no YAML; or the port is not a number, or 0, which stands for any free one.
    """
    chosen = {**variables(environ), **given}
    if chosen.get("config", "null") != "null":
        chosen = {**file_settings(chosen["config"]), **chosen}
    # The word null takes a setting back that a weaker source has made.
    chosen = {name: value for name, value in chosen.items() if value != "null"}
    host, port, uds = chosen.get("host", ""), chosen.get("port", "8000"), chosen.get("uds", "")
    if not uds and not (port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"cannot ask on port {port!r}: set OCTAVO_PORT to a number from 1 to 65535")
    everywhere = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
    return Address(
        host=everywhere.get(host, host),
        port=0 if uds else int(port),
        uds=os.path.expanduser(uds),
        tls=bool(chosen.get("ssl_certfile")),
    )


def connect(address: Address, timeout: float) -> socket.socket:
    """A connection to the service. Its certificate is not verified: it names the outside, not this machine."""
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
    """Status and body of a GET, of which `most` bytes are read.

    Raises:
        OSError, HTTPException: it cannot be reached, or does not answer in HTTP within `timeout` seconds.
    """
    # The host goes into the Host header alone: the connection is made here.
    asked = HTTPConnection("localhost")
    asked.sock = connect(address, timeout)
    try:
        asked.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        answer = asked.getresponse()
        return answer.status, answer.read(most).decode(errors="replace").strip()
    finally:
        asked.close()


def problem(address: Address, timeout: float = TIMEOUT) -> str:
    """The reason why the service is not ready, in one line; empty if it is.

    Raises:
        OSError, HTTPException: as from `ask`.
    """
    status, body = ask(address, "/health", timeout=timeout)
    return "" if status == 200 else f"/health answered {status}: {body}"


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Ask once; returns the exit status."""
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
