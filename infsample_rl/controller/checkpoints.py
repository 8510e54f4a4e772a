"""Checkpoints in the run folder: written under a temporary name and renamed, the last few kept, found again on resume.

checkpoints/step_000010/ is a Hugging Face folder (from_pretrained takes it) with training_state/, driver_state.json and
checksums.json (bytes and CRC-32 of every file) beside.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from infsample_rl.observe.files import nearest_existing

STATE_FILE, CHECKSUM_FILE = "driver_state.json", "checksums.json"
# a thread of a process with many takes its memory from any of their pools, and what it takes there stays
CHUNK_BYTES, THREADS = 2**20, 4


def write_checkpoint(run_dir: Path, state: dict[str, Any], save: Callable[[str], None]) -> Path:
    """Let `save` fill a temporary folder, add the driver's state, rename it.

    RuntimeError when the learner's files are not in it: a rank on another node has written to a disk of its own.
    """
    folder = run_dir / "checkpoints" / f"step_{state['step']:06d}"
    partial = folder.with_name(f".partial_{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save(str(partial))
        if not any(partial.glob("*.safetensors")):
            raise RuntimeError(
                f"the learner saved into {partial}, but nothing is there: run.dir must be a folder that every node "
                "shares"
            )
        (partial / STATE_FILE).write_text(json.dumps(state, indent=1) + "\n")
        write_checksums(partial)
        _sync_to_disk(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk gets its room back
        raise
    os.replace(partial, folder)
    _sync_to_disk(folder.parent)
    return folder


def _sync_to_disk(folder: Path) -> None:
    """Flush a folder and every file in it, so that a renamed folder is a whole one even after a power cut."""
    for path in (folder, *folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def drop_old(run_dir: Path, keep: int) -> list[str]:
    """Drop all checkpoints but the newest `keep`; what could not be dropped, and why."""
    kept = []
    for old in checkpoints(run_dir)[:-keep]:
        try:
            old.unlink() if old.is_symlink() else shutil.rmtree(old)
        except OSError as error:
            kept.append(
                f"{old} could not be removed ({error.strerror or error}): it stays beside the newest {keep} checkpoints"
            )
    return kept


def checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return [path for path in folders_after(run_dir / "checkpoints", -1) if (path / STATE_FILE).is_file()]


def folders_after(folder: Path, step: int) -> list[Path]:
    """Checkpoints, or recordings, of steps after `step`, oldest first; not e.g. step_000010_merged beside them."""
    numbers = {path: int(path.name[5:]) for path in folder.glob("step_*") if re.fullmatch(r"step_\d{6,}", path.name)}
    return sorted((path for path, number in numbers.items() if number > step), key=numbers.__getitem__)


def set_aside_after(run_dir: Path, step: int) -> None:
    """Move checkpoints and recordings of steps that are about to be done again into a folder superseded beside them.

    What a killed save has left is dropped.
    """
    for partial in (run_dir / "checkpoints").glob(".partial_*"):
        shutil.rmtree(partial)
    for name in ("checkpoints", "recordings"):
        for path in folders_after(run_dir / name, step):
            aside = path.parent / "superseded" / path.name
            aside.parent.mkdir(exist_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(path, aside)


def check_new_folder(run_dir: Path) -> None:
    """ValueError for a run folder that could not be made; nothing is made."""
    try:
        above = nearest_existing(run_dir)
        problem = errno.EEXIST if above == run_dir else None if above.is_dir() else errno.ENOTDIR
        if problem is None and not os.access(above, os.W_OK | os.X_OK):
            problem = errno.EACCES
    except OSError as error:  # a name that is too long
        problem = error.errno
    if problem is not None:
        raise ValueError(f"run.dir={run_dir} cannot be written ({os.strerror(problem)})")


def lock_run_folder(run_dir: Path) -> TextIO:
    """Keep every other process out of the run folder for as long as the returned file is open. ValueError if it cannot
    be had."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / ".lock").open("w")
    except OSError as error:
        raise ValueError(f"run.dir={run_dir} cannot be written ({error.strerror})") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        why = "is in use by a running process; give another run.dir"
        if not isinstance(error, BlockingIOError):
            why = f"cannot be locked ({error.strerror}): it needs a file system with flock (Lustre: -o flock)"
        raise ValueError(f"run.dir={run_dir} {why}") from None
    return lock


def newest_whole(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose files are what was written, none if there is none; and what is wrong with those that
    are newer."""
    damages: list[str] = []
    for folder in reversed(folders_after(run_dir / "checkpoints", -1)):
        damage = find_damage(folder) if (folder / STATE_FILE).is_file() else f"{STATE_FILE} is missing"
        if damage is None:
            return folder, damages
        damages.append(f"{folder} is damaged and not used: {damage}")
    return None, damages


def find_checkpoint(run_dir: Path, resume: str) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from, and warnings: none with `never`, the newest whole one with `auto`, else the folder
    named.

    ValueError if that is none, or damaged: also with `auto`, where all are, since to begin again would set aside what
    the run has logged.
    """
    if resume == "auto":
        newest, damages = newest_whole(run_dir)
        if newest is None and damages:
            raise ValueError(
                f"run.resume=auto, but no checkpoint of run.dir={run_dir} is whole: {'; '.join(damages)}; put one "
                "back, or begin in another run.dir"
            )
        return newest, damages
    if resume == "never":
        metrics = run_dir / "metrics.jsonl"  # empty: of a start that was refused
        if (metrics.exists() and metrics.stat().st_size > 0) or (run_dir / "checkpoints").exists():
            raise ValueError(
                f"run.resume=never, but run.dir={run_dir} already holds a run; give another run.dir, or "
                "run.resume=auto to go on with it"
            )
        return None, []
    folder = Path(resume)
    if not (folder / STATE_FILE).is_file():
        here = ", ".join(map(str, checkpoints(run_dir))) or "none"
        raise ValueError(
            f"run.resume={resume} is not a checkpoint (no {STATE_FILE} in it); auto, never, or a folder; in run.dir "
            f"there are: {here}"
        )
    damage = find_damage(folder)
    if damage is not None:
        raise ValueError(f"run.resume={resume} is damaged: {damage}")
    return folder, []


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The driver's state of a checkpoint: step, data position, expected lengths."""
    return json.loads((checkpoint / STATE_FILE).read_text())


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


def _checksums(folder: Path) -> dict[str, tuple[int, int]]:
    """{path in the folder: (bytes, CRC-32)}"""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / CHECKSUM_FILE)
    with ThreadPoolExecutor(THREADS) as pool:
        names = [path.relative_to(folder).as_posix() for path in paths]
        return dict(zip(names, pool.map(_checksum, paths), strict=True))


def _checksum(path: Path) -> tuple[int, int]:
    size = checksum = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    except OSError as error:  # one that comes from reading names no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    return size, checksum
