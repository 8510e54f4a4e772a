"""Checkpoints in the run folder: written under a temporary name and renamed, the last few kept, found again on resume.

checkpoints/step_000010/ is a Hugging Face folder (from_pretrained takes it) with training_state/ and driver_state.json
beside.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from infsample_rl.controller.checksums import find_damage, write_checksums

STATE_FILE = "driver_state.json"


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
    return sorted(
        (path for path in _step_folders(run_dir / "checkpoints") if (path / STATE_FILE).is_file()), key=_step_in_name
    )


def _step_folders(folder: Path) -> list[Path]:
    """Folders that a save has named, not e.g. step_000010_merged beside them."""
    return [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{6,}", path.name)]


def _step_in_name(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


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


def folders_after(folder: Path, step: int) -> list[Path]:
    """Checkpoints, or recordings, of steps after `step`."""
    return [path for path in _step_folders(folder) if _step_in_name(path) > step]


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
    except BlockingIOError:
        lock.close()
        raise ValueError(f"run.dir={run_dir} is in use by a running process; give another run.dir") from None
    return lock


def newest_whole(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose files are what was written, none if there is none; and what is wrong with those that
    are newer."""
    damages = []
    for folder in sorted(_step_folders(run_dir / "checkpoints"), key=_step_in_name, reverse=True):
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
        here = ", ".join(str(path) for path in checkpoints(run_dir)) or "none"
        raise ValueError(
            f"run.resume={resume} is not a checkpoint (no {STATE_FILE} in it); auto, never, or a folder; in run.dir "
            f"there are: {here}"
        )
    damage = find_damage(folder)
    if damage is not None:
        raise ValueError(f"run.resume={resume} is damaged: {damage}")
    return folder, []


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The driver's state of a checkpoint: step and data position."""
    return json.loads((checkpoint / STATE_FILE).read_text())


def step_of(checkpoint: Path) -> int:
    """The last step a checkpoint has."""
    return int(read_state(checkpoint)["step"])


def _sync_to_disk(folder: Path) -> None:
    """Flush a folder and every file in it, so that a renamed folder is a whole one even after a power cut."""
    for path in (folder, *folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
