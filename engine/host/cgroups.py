"""The control groups of this process, which contain its container's limits; the memory that they leave.

psutil does not read control groups.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def own_groups(controller: str, mounted: Path = MOUNT, listing: Path = OWN_GROUPS) -> Iterator[tuple[int, Path]]:
    """The version (1 or 2) and the folder of each group of this process for a controller, such as "memory", from the
    innermost one outwards; the folders need not exist.

    Args:
        mounted: where the control groups are mounted.
        listing: the file that lists this process's groups.
    """
    for line in text_of(listing).splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, mount = 2, mounted
        elif controller in controllers.split(","):
            version, mount = 1, mounted / controller
        else:
            continue
        # In a container the path may be the host's; the mount itself is then the container's group.
        own = mount / path.lstrip("/")
        for group in (own, *own.parents):
            yield version, group
            if group == mount:
                break


def text_of(file: Path) -> str:
    """The text of a system file; "" if the file does not exist."""
    try:
        return file.read_text()
    except OSError:
        return ""


def available_memory(cgroups: Path = MOUNT, listing: Path = OWN_GROUPS) -> int:
    """Bytes that this process can still use on the host, within the limits of its control groups.

    Args:
        cgroups: where the control groups are mounted.
        listing: the file that lists this process's groups.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", text_of(Path("/proc/meminfo")), re.MULTILINE)
    if found:
        free = int(found[1]) * 1024
    left = [
        size for version, group in own_groups("memory", cgroups, listing) for size in _left(group, *_FILES[version])
    ]
    return max(0, min([free, *left]))


def _left(group: Path, limit_file: str, usage_file: str, cache: str) -> list[int]:
    limit, used = text_of(group / limit_file).strip(), text_of(group / usage_file).strip()
    if not limit.isdigit() or not used.isdigit():  # "max", or no such group
        return []
    # Cached files count as used, but are dropped when memory is needed.
    files = re.search(rf"^{cache} (\d+)$", text_of(group / "memory.stat"), re.MULTILINE)
    return [int(limit) - int(used) + (int(files[1]) if files else 0)]
