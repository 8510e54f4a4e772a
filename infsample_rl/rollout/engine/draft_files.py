"""Texts that drafts are found in, kept in the run folder: a worker that begins anew, as after a crash or in a resumed
run, drafts from what all workers have sampled before. What it drafts changes no sample."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np

from infsample_rl.rollout.schedule.drafter import BYTES_PER_TOKEN, MOST_BYTES, Drafter, Texts

FOLDER = "drafts"  # of a run
WRITING = 0.01  # of a worker's time, at most


class DraftFile:
    """What one worker has sampled last, as far as MOST_BYTES of its memory hold: about 4 MB."""

    def __init__(self, run_dir: Path, worker: int, drafter: Drafter, vocab_size: int) -> None:
        """Gives the drafter what the files of all workers hold; a file that is damaged, or of another vocabulary, is
        warned of and left out."""
        self._path, self._drafter = run_dir / FOLDER / f"worker_{worker}.npz", drafter
        self._is_broken = False
        self._written = 0  # samples that the drafter had kept
        self._not_before = 0.0  # time.perf_counter()
        for prompt, samples in _newest([_read(path, vocab_size) for path in sorted(self._path.parent.glob("*.npz"))]):
            drafter.add(prompt, samples)

    def write(self) -> float:
        """Where samples were kept since the last time, and that is long enough ago; the seconds it took. Not while
        samples are drawn. Where nothing can be written, as on a full disk, a warning says so once."""
        started, num_kept = time.perf_counter(), self._drafter.num_kept
        if not self._is_broken and num_kept != self._written and started >= self._not_before:
            self._write()
            self._written, ended = num_kept, time.perf_counter()
            self._not_before = ended + (ended - started) / WRITING
        return time.perf_counter() - started

    def _write(self) -> None:
        texts = self._drafter.ended()
        parts = [part for prompt, samples in texts for part in (prompt, *samples)]
        aside = self._path.with_name(f".{self._path.name}.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as file:
                np.savez(
                    file,
                    tokens=np.frombuffer(b"".join(parts), np.int32),
                    lengths=np.array([len(part) // 4 for part in parts], np.int64),
                    counts=np.array([len(samples) for _, samples in texts], np.int64),
                )
            os.replace(aside, self._path)
        except OSError as error:
            self._is_broken = True
            with contextlib.suppress(OSError):
                aside.unlink()
            warnings.warn(f"what drafts are found in is not kept, after a crash it is gone: {error}", stacklevel=3)


def _read(path: Path, vocab_size: int) -> Sequence[Texts]:
    """Prompts and their samples, the prompt used last at the end."""
    try:
        with np.load(path) as file:
            tokens, lengths, counts = (file[name] for name in ("tokens", "lengths", "counts"))
        if tokens.dtype != np.int32 or lengths.sum() != len(tokens) or (counts + 1).sum() != len(lengths):
            raise ValueError("its parts do not fit together")
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise ValueError(f"it has tokens outside the vocabulary of {vocab_size:,}")
    except Exception as error:  # a damaged header may raise whatever parsing it raises
        warnings.warn(f"{path} is damaged, nothing is drafted from it: {error}", stacklevel=3)
        return []
    parts = [part.tobytes() for part in np.split(tokens, np.cumsum(lengths)[:-1])]
    starts = np.cumsum([0, *(counts + 1)])[:-1]
    return [(parts[start], parts[start + 1 : start + 1 + count]) for start, count in zip(starts, counts, strict=True)]


def _newest(files: Sequence[Sequence[Texts]]) -> list[Texts]:
    """Of all files as many prompts as a drafter keeps, those that each has used last; the last of them at the end."""
    room, found, seen = MOST_BYTES // BYTES_PER_TOKEN, list[Texts](), set[tuple[bytes, bytes]]()
    for at_once in zip_longest(*map(reversed, files)):
        for prompt, samples in filter(None, at_once):
            new = [tokens for tokens in samples if (prompt, tokens) not in seen]
            if not new:  # where another has it, which used it later
                continue
            seen.update((prompt, tokens) for tokens in new)
            room -= (len(prompt) + sum(map(len, new))) // 4
            if room < 0:
                return found[::-1]
            found.append((prompt, new))
    return found[::-1]
