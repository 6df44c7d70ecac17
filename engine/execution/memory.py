"""How much of the host's memory is left for this process."""

from __future__ import annotations

import os
import re
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def available_memory(cgroups: Path = _ROOT, own_groups: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes this process can still take on the host, the limits of its control groups included.

    Args:
        cgroups: where the control groups are mounted.
        own_groups: the file that says which of them this process belongs to.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(Path("/proc/meminfo")), re.MULTILINE)
    if found:
        free = int(found[1]) * 1024
    return max(0, min([free, *_left_in_groups(cgroups, _text(own_groups))]))


def _left_in_groups(cgroups: Path, own_groups: str) -> list[int]:
    """What is left under the limit of each group that holds this process, in version 2 and in version 1."""
    left = []
    for line in own_groups.splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be the host's; then the mount itself is the container's group.
        own = mount / path.lstrip("/")
        for group in (own, *own.parents):
            left += _left(group, *names)
            if group == mount:
                break
    return left


def _left(group: Path, limit_file: str, usage_file: str, cache: str) -> list[int]:
    limit, used = _text(group / limit_file).strip(), _text(group / usage_file).strip()
    if not limit.isdigit() or not used.isdigit():  # "max", or no such group
        return []
    # Cached files count as used, and give way when memory is needed.
    files = re.search(rf"^{cache} (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
    return [int(limit) - int(used) + (int(files[1]) if files else 0)]


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
