"""Which torch to install: the CPU build where there is no NVIDIA driver, without ever downloading one to find out."""

import json
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PUBLIC_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
DEFAULT_SIZE = "about 3 GB to download with its CUDA libraries, about 7 GB on disk"


class SetupError(Exception):
    """Set-up cannot go on; the message says why and what to do."""


@dataclass(frozen=True)
class Offer:
    """A torch that a package source holds: its version, whether it is a CPU build, its size if known."""

    version: str
    cpu: bool
    megabytes: float | None = None


@dataclass(frozen=True)
class TorchSource:
    """The arguments of `pip install --no-deps`, and one line for people."""

    requirement: str
    options: tuple[str, ...]
    why: str


def pinned_version(constraints: str, package: str) -> str:
    """The version that the text of a constraints file pins for `package`."""
    match = re.search(rf"^{re.escape(package)}==(\S+)", constraints, re.MULTILINE)
    if not match:
        raise SetupError(f"constraints.txt pins no {package}: a line such as {package}==1.2.3 is missing.")
    return match[1]


def offer_from_report(report: dict[str, Any]) -> Offer | None:
    """Reads pip's installation report of one package."""
    for item in report.get("install", []):
        metadata = item["metadata"]
        version = str(metadata["version"])
        needs = metadata.get("requires_dist") or []
        accelerated = any(re.match(r"(nvidia|cuda|triton|pytorch-triton|rocm|intel-)", need) for need in needs)
        return Offer(version, "+cpu" in version or ("+" not in version and not accelerated))
    return None


def offer_from_line(line: str) -> Offer | None:
    """Reads pip's word that it starts to download a whole wheel; None for any other line.

    Only indexes that serve no metadata of their own make pip do that.
    """
    match = re.match(r"\s*Downloading .*?torch-([^-\s]+)-\S+\.whl \(([\d.]+) ([kMG])B", line)
    if not match:
        return None
    version, size = match[1].replace("%2B", "+"), float(match[2]) * {"k": 1e-3, "M": 1.0, "G": 1e3}[match[3]]
    # Without metadata the size tells: CPU builds are near 200 MB, those for CUDA well above 500.
    return Offer(version, "+cpu" in version or ("+" not in version and size < 300), size)


def choose_torch(
    pin: str,
    *,
    index: str | None,
    driver: bool,
    system: str,
    configured: Callable[[], Offer | None],
    public: Callable[[], Offer | None],
) -> TorchSource:
    """Decides where torch comes from. The callables look outside, and are asked only when the answer matters.

    Args:
        pin: the version that is tested.
        index: TORCH_INDEX, which overrides everything.
        driver: whether an NVIDIA driver is present.
        system: platform.system(): only Linux's default build carries CUDA.
        configured: what pip's configured sources would give.
        public: what PyTorch's public CPU index would give.
    """
    if index:
        return TorchSource(f"torch=={pin}", ("--index-url", index), f"torch {pin} from TORCH_INDEX={index}")
    if driver:
        return TorchSource(f"torch=={pin}", (), f"NVIDIA driver found: the default build of torch {pin}")
    if system != "Linux":
        return TorchSource(f"torch=={pin}", (), f"the default build of torch {pin} ({system})")
    offer = configured()
    if offer and offer.cpu:
        return TorchSource(f"torch=={offer.version}", (), f"no NVIDIA driver: torch {offer.version}, a CPU build")
    found = public()
    if found and found.cpu:
        options = ("--index-url", PUBLIC_CPU_INDEX)
        return TorchSource(f"torch=={found.version}", options, f"no NVIDIA driver: torch {found.version} for the CPU")
    why = (
        f"no NVIDIA driver, but no CPU build of torch {pin} is within reach either: the default build it is, "
        f"{DEFAULT_SIZE}. To choose another source, set TORCH_INDEX to the URL of a package index."
    )
    return TorchSource(f"torch=={pin}", (), why)


def nvidia_driver() -> bool:
    if Path("/proc/driver/nvidia/version").exists():
        return True
    tool = shutil.which("nvidia-smi")
    if not tool:
        return False
    try:
        found = subprocess.run([tool, "-L"], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0 and b"GPU" in found.stdout


def ask_pip(
    pip: Sequence[str], environment: Mapping[str, str], pin: str, options: Sequence[str], seconds: float
) -> Offer | None:
    """The torch that pip would take, without downloading it; None if it finds none or gives no answer in time."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [*pip, "install", "--dry-run", "--no-deps", "--ignore-installed", "--report", str(report)]
        process = subprocess.Popen(
            [*command, *options, f"torch=={pin}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=environment,
        )
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            assert process.stdout
            for line in process.stdout:
                offer = offer_from_line(line)
                if offer:
                    return offer
            if process.wait() == 0 and report.exists():
                return offer_from_report(json.loads(report.read_text(encoding="utf-8")))
            return None
        finally:
            timer.cancel()
            process.kill()
            process.wait()
