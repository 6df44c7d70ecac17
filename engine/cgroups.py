"""The control groups that this process belongs to: where its container's limits are found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def own_groups(controller: str, mounted: Path = MOUNT, listing: Path = OWN_GROUPS) -> Iterator[tuple[int, Path]]:
    """The version (1 or 2) and the folder of each group that holds this process and has to do with a controller, such
    as "memory", from the innermost one outwards; folders need not be there.

    Args:
        mounted: where the control groups are mounted.
        listing: the file that says which of them this process belongs to.
    """
    for line in text_of(listing).splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, mount = 2, mounted
        elif controller in controllers.split(","):
            version, mount = 1, mounted / controller
        else:
            continue
        # In a container the path may be the host's; then the mount itself is the container's group.
        own = mount / path.lstrip("/")
        for group in (own, *own.parents):
            yield version, group
            if group == mount:
                break


def text_of(file: Path) -> str:
    """What a file of the system says; "" if there is no such file."""
    try:
        return file.read_text()
    except OSError:
        return ""
