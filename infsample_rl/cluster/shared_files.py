"""The proof, at start, that every node sees the same run folder, model and data as the driver. Standard library only;
session.py carries it out.

driver                                     every node
token into a folder of run.dir         ->  reads it there, writes a file beside it, compares the size of every file

Where run.dir is not there yet, that is a folder of the nearest one above it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from pathlib import Path

from infsample_rl.config import Config

FOLDER = ".cluster_check_"  # followed by the token
READ_PATIENCE_S = 5.0  # a network file system may show a new file late

Files = list[tuple[str, str, int]]  # setting, file, bytes


def needed_files(config: Config) -> Files:
    """Every local file the workers read, with the setting that names it and its size."""
    paths = [
        ("model.path", config.model.path),
        ("model.tokenizer_path", config.model.tokenizer_path),
        ("model.chat_template", config.model.chat_template),
        ("reference.path", config.reference.path),
        ("rollout.predictor_path", config.rollout.predictor_path),
        *(("data.source", part.source) for part in config.data.parts.values()),
        *(("data.eval_source", part.held_out) for part in config.data.parts.values()),
        ("run.resume", None if config.run.resume in ("auto", "never") else config.run.resume),
    ]
    for function in config.reward.functions:
        path, _, _ = function.name.rpartition(":")
        paths.append(
            ("reward.functions", function.name.removeprefix("model:") if function.name.startswith("model:") else path)
        )
    paths += [("reward.functions", judge.prompt) for judge in config.reward.judges]
    paths += [("environment", path) for path in config.environment.files]
    return [
        (setting, str(file), file.stat().st_size)
        for setting, path in paths
        if path and os.path.isabs(path)
        for file in _files(Path(path))
    ]


def offer_token(above: Path) -> str:
    """Write a new token into a folder of `above`, where every node must find it."""
    token = secrets.token_hex(16)
    folder = above / (FOLDER + token)
    folder.mkdir()
    (folder / "driver").write_text(token)
    return token


def prove(above: str, token: str, node: str, files: Files) -> list[str]:
    """What this machine does not see as the driver does, in words; it writes into the driver's folder alone."""
    folder, problems = Path(above) / (FOLDER + token), list[str]()
    if not _holds(folder / "driver", token):
        what = "is another folder there (a local disk?)" if Path(above).is_dir() else "is not there"
        problems = [f"run.dir: {above} {what}"]
    else:
        try:
            (folder / node).touch()
        except OSError as error:
            problems = [f"run.dir: {above} cannot be written there ({error.strerror})"]
    for setting, name, size in files:
        found = os.stat(name).st_size if os.path.exists(name) else None
        if found != size:
            has = "is not there" if found is None else f"has {found:,} bytes there, {size:,} here"
            return [*problems, f"{setting}: {name} {has}"]
    return problems


def end_check(above: Path, token: str) -> None:
    """Remove the token's folder."""
    shutil.rmtree(above / (FOLDER + token), ignore_errors=True)


def _holds(path: Path, token: str) -> bool:
    until = time.monotonic() + READ_PATIENCE_S
    while True:
        try:
            if path.read_text() == token:
                return True
        except OSError:  # not there, or not yet
            pass
        if time.monotonic() > until:
            return False
        time.sleep(0.2)


def _files(path: Path) -> list[Path]:
    """The file itself, or those of a folder, hidden ones left out."""
    if path.is_file():
        return [path]
    return sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
