"""What environments answered, kept in the run folder as long as their step may have to be done again: whoever samples a
lost trajectory again takes its turns from here, and asks its environment only for what nobody has asked it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infsample_rl.config.environment import EnvironmentConfig
from infsample_rl.observe.records import RecordFile, read_records
from infsample_rl.types import Request

FOLDER = "turns"  # of a run


class TurnRecords:
    """Of one stream: those of the same step that are there when it begins, and a file of its own."""

    def __init__(self, run_dir: Path, *, step: int, evaluation: bool, made_by: str) -> None:
        """`made_by`: fingerprint() of the environments; what others have answered is not taken."""
        self._step, self._made_by = step, made_by
        self._folder = run_dir / FOLDER / f"{'evaluation' if evaluation else 'step'}_{step:06d}"
        self._file: RecordFile | None = None
        self._is_broken = False
        self._known = dict[tuple[int, int, int, int], tuple[str, dict[str, Any]]]()
        for path in sorted(self._folder.glob("*.jsonl")):
            for found in read_records(path):
                if found["made_by"] == made_by:
                    self._known[tuple(found["place"])] = found["request"], found["reply"]

    def find(self, place: tuple[int, int, int, int], request: Request) -> dict[str, Any] | None:
        """What was answered to the request at (prompt_index, sample_index, seed, number of the request in its
        trajectory); None where there was none, or another."""
        asked, reply = self._known.get(place, ("", None))
        return reply if asked == json.dumps(request) else None

    def add(self, place: tuple[int, int, int, int], request: Request, reply: dict[str, Any]) -> None:
        """Keep an answer. One of a trajectory that failed is not kept: the reason may be gone the next time. Where
        nothing can be written, as on a full disk, a warning says so once."""
        if self._is_broken or ("failed" in reply and "said" not in reply):
            return
        own = {"step": self._step, "made_by": self._made_by, "place": place}
        try:
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = RecordFile(self._folder / f"{secrets.token_hex(8)}.jsonl", 0)
            self._file.append([own | {"request": json.dumps(request), "reply": reply}])
        except OSError as error:
            self._is_broken = True
            warnings.warn(
                f"answers of environments are not kept, after a crash they are asked again: {error}", stacklevel=2
            )

    def close(self) -> None:
        """The stream is over."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what a full disk has no room for was warned of
                self._file.close()


def fingerprint(config: EnvironmentConfig, functions: Sequence[str] = ()) -> str:
    """Of the files that environments are made of, and of those of reward functions, which may be asked with them: it
    changes with what they hold."""
    digest = hashlib.sha256(json.dumps([config.factory, config.tools, *functions]).encode())
    for path in [*config.files, *(name.rpartition(":")[0] for name in functions)]:
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()[:16]


def forget_turns(run_dir: Path, before: int | None = None) -> None:
    """Drop what steps before this one have kept, None: all. They will not be done again."""
    for folder in (run_dir / FOLDER).glob("*_*"):
        number = re.fullmatch(r"(step|evaluation)_(\d+)", folder.name)
        if number and (before is None or int(number[2]) < before):
            shutil.rmtree(folder, ignore_errors=True)
    if before is None:
        shutil.rmtree(run_dir / FOLDER, ignore_errors=True)
