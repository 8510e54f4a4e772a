"""Whether a folder is on a disk."""

from __future__ import annotations

import os
from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs")


def check_disk_folder(name: str, folder: str) -> None:
    """ValueError for a folder, given as setting `name`, that is missing, cannot be written to or is itself in
    memory."""
    if not Path(folder).is_dir():
        raise ValueError(f"{name} must be a folder of its worker's machine, got {folder}, which is none")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{name}={folder} cannot be written to")
    kind = file_system(Path(folder))
    if kind in IN_MEMORY:
        raise ValueError(f"{name} must be on a disk, got {folder}, which is a {kind} and lies in memory")


def file_system(folder: Path) -> str:
    """What the folder's file system is called; empty where the system does not tell."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    # a later one covers an earlier
    held = {Path(point.encode().decode("unicode_escape")): kind for _, point, kind, *_ in mounts}
    found = folder.resolve()
    return next((held[place] for place in (found, *found.parents) if place in held), "")
