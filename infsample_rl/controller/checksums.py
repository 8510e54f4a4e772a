"""Whether the files of a folder are still what was written: sizes and CRC-32 of each, in one JSON file beside them."""

from __future__ import annotations

import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHECKSUM_FILE = "checksums.json"
# a thread of a process with many takes its memory from any of their pools, and what it takes there stays
_CHUNK = 2**20
_THREADS = 4


def write_checksums(folder: Path) -> None:
    """Note size and CRC-32 of every file in `folder`, those of its folders too."""
    (folder / CHECKSUM_FILE).write_text(json.dumps(_checksums(folder), indent=1) + "\n")


def find_damage(folder: Path) -> str | None:
    """What is wrong with a folder that write_checksums() has seen: a file that is missing, unreadable, cut short or
    changed. None if nothing is."""
    try:
        listed = json.loads((folder / CHECKSUM_FILE).read_text())
        expected = {str(name): (int(size), int(checksum)) for name, (size, checksum) in dict(listed).items()}
    except (OSError, ValueError, TypeError) as error:
        return f"{CHECKSUM_FILE} cannot be read ({error})"
    if not expected:
        return f"{CHECKSUM_FILE} lists no file"
    try:
        found = _checksums(folder)
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    for name, (size, checksum) in expected.items():
        if name not in found:
            return f"{name} is missing"
        if found[name][0] != size:
            return f"{name} has {found[name][0]:,} bytes instead of {size:,}"
        if found[name][1] != checksum:
            return f"the bytes of {name} have changed"
    return None


def _checksums(folder: Path) -> dict[str, list[int]]:
    """{path in the folder: [bytes, CRC-32]}"""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / CHECKSUM_FILE)
    with ThreadPoolExecutor(_THREADS) as pool:
        return {
            path.relative_to(folder).as_posix(): found
            for path, found in zip(paths, pool.map(_checksum, paths), strict=True)
        }


def _checksum(path: Path) -> list[int]:
    size = checksum = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    except OSError as error:  # one that comes from reading names no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    return [size, checksum]
