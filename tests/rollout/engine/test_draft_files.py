"""What drafts are found in outlives its worker: in the run folder, within its bytes, and without harm where it is
damaged."""

import zipfile
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from infsample_rl.config import (
    RolloutConfig,
    RunConfig,
)
from infsample_rl.rollout.engine import draft_files
from infsample_rl.rollout.engine.draft_files import DraftFile
from infsample_rl.rollout.kernels import cpu_kernels
from infsample_rl.rollout.schedule.drafter import BYTES_PER_TOKEN, Drafter
from infsample_rl.rollout.worker import RolloutWorker
from infsample_rl.types import RolloutWork

WORK = [RolloutWork(prompt_index=0, prompt_ids=np.array([5, 9, 7], np.int32), sample_indices=list(range(6)))]


@pytest.fixture
def config(worker_config, tmp_path):
    own = RolloutConfig(group_size=6, slots=2, max_new_tokens=40, speculate="7")
    return replace(worker_config, run=RunConfig(seed=4, dir=str(tmp_path / "run")), rollout=own)


def sampled(config, index):
    """Tokens of every sample of a new worker's stream, and the running steps that they took."""
    worker = RolloutWorker(config, index)
    items = [item for item in worker.stream(WORK, step=1) if isinstance(item, list)]
    tokens = {each.sample_index: each.token_ids.tolist() for group in items for each in group}
    return tokens, worker.engine.stats.running_steps


def test_a_worker_that_begins_anew_drafts_from_what_all_have_sampled(config, tmp_path):
    first, steps = sampled(config, 0)
    again, fewer = sampled(config, 1)
    assert again == first and fewer < 0.5 * steps, "the very samples are known"
    files = sorted((tmp_path / "run" / "drafts").iterdir())
    assert [file.name for file in files] == ["worker_0.npz", "worker_1.npz"]
    sampled(config, 0)
    for file in files:
        with np.load(file) as kept:
            assert len(kept["lengths"]) == 1 + len({tuple(tokens) for tokens in first.values()}), "each sample once"
            assert kept["tokens"][:3].tolist() == [5, 9, 7]


def test_a_sample_that_is_there_already_takes_no_room():
    drafter, text = Drafter(cpu_kernels.load()), np.arange(50, dtype=np.int32).tobytes()
    sizes = []
    for _ in range(3):
        drafter.add(text[:40], [text])
        sizes += [texts.num_bytes for texts in drafter._texts.values()]
    assert len(set(sizes)) == 1


def test_without_drafts_or_a_run_folder_nothing_is_written(config, tmp_path):
    sampled(replace(config, rollout=replace(config.rollout, speculate="0")), 0)
    sampled(replace(config, run=replace(config.run, dir=None)), 0)
    assert not (tmp_path / "run").exists()


def damage_cut(path):
    path.write_bytes(path.read_bytes()[:-40])


def damage_bytes(path):
    content = bytearray(path.read_bytes())
    content[150] ^= 255
    path.write_bytes(content)


def damage_flags(path):  # as if it were encrypted
    content = bytearray(path.read_bytes())
    for start, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.find(start) + offset] |= 1
    path.write_bytes(content)


def damage_parts(path):
    np.savez(path, tokens=np.zeros(4, np.int32), lengths=np.array([3]), counts=np.array([0]))


def damage_tokens(path):
    np.savez(path, tokens=np.array([64], np.int32), lengths=np.array([1]), counts=np.array([0]))


def damage_header(path):  # whole by its checksum, but no header
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("tokens.npy", b"\x93NUMPY\x01\x00\x08\x00{'a': (\n")


def damage_code(path):
    np.savez(path, tokens=np.array([print], object), lengths=np.array([1]), counts=np.array([0]))


@pytest.mark.parametrize(
    "damage", [damage_cut, damage_bytes, damage_flags, damage_parts, damage_tokens, damage_header, damage_code]
)
def test_a_damaged_file_is_warned_of_and_written_anew(config, tmp_path, damage):
    first, steps = sampled(config, 0)
    damage(tmp_path / "run" / "drafts" / "worker_0.npz")
    with pytest.warns(UserWarning, match=r"worker_0.npz is damaged, nothing is drafted from it: "):
        again = sampled(config, 0)
    assert again == (first, steps)
    assert sampled(config, 0)[1] < 0.5 * steps


def test_where_nothing_can_be_written_a_warning_says_so_once(config, tmp_path):
    (tmp_path / "run").write_text("no folder")
    worker = RolloutWorker(config, 0)
    with pytest.warns(UserWarning, match="what drafts are found in is not kept") as said:
        for _ in range(2):
            list(worker.stream(WORK, step=1))
    assert len(said) == 1


def test_the_prompts_used_last_are_taken_from_all_files(tmp_path, monkeypatch):
    for worker in range(3):
        drafter = Drafter(cpu_kernels.load())
        for prompt in range(4):
            text = np.full(100, 10 * worker + prompt, np.int32).tobytes()
            drafter.add(text[:40], [text])
        own = DraftFile(tmp_path, worker, Drafter(cpu_kernels.load()), 64)
        own._drafter = drafter  # without what the others have kept
        own.write()
    monkeypatch.setattr(draft_files, "MOST_BYTES", BYTES_PER_TOKEN * 110 * 5)
    drafter = Drafter(cpu_kernels.load())
    DraftFile(tmp_path, 0, drafter, 64)
    assert [prompt[0] for prompt, _ in drafter.ended()] == [12, 2, 23, 13, 3]


def test_what_several_files_hold_takes_room_once(tmp_path, monkeypatch):
    texts = [np.full(100, prompt, np.int32).tobytes() for prompt in range(4)]
    for worker in range(3):
        drafter = Drafter(cpu_kernels.load())
        for text in texts[::-1] if worker == 1 else texts:
            drafter.add(text[:40], [text])
        own = DraftFile(tmp_path, worker, drafter, 64)
        own.write()
    monkeypatch.setattr(draft_files, "MOST_BYTES", BYTES_PER_TOKEN * 110 * 4)
    drafter = Drafter(cpu_kernels.load())
    DraftFile(tmp_path, 0, drafter, 64)
    assert [prompt[0] for prompt, _ in drafter.ended()] == [1, 2, 0, 3]  # as each was used last by any


@pytest.fixture
def draft_file(tmp_path, monkeypatch):
    """A file that takes half a second to write, the clock, and the seconds of its writes."""
    clock, writes = SimpleNamespace(now=100.0, perf_counter=lambda: clock.now), []
    monkeypatch.setattr(draft_files, "time", clock)
    file = DraftFile(tmp_path, 0, Drafter(cpu_kernels.load()), 64)

    def write():
        writes.append(clock.now)
        clock.now += 0.5

    monkeypatch.setattr(file, "_write", write)
    return file, clock, writes


def test_a_file_is_written_where_samples_are_new_and_takes_a_hundredth_of_the_time(draft_file):
    file, clock, writes = draft_file
    prompt, samples = bytes(12), [np.full(20, token, np.int32).tobytes() for token in range(3)]
    assert file.write() == 0 and not writes, "nothing was sampled"
    file._drafter.add(prompt, samples[:1])
    assert file.write() == 0.5 and len(writes) == 1
    file._drafter.add(prompt, samples[:2])
    assert file.write() == 0 and len(writes) == 1, "too soon"
    clock.now += 50
    assert file.write() == 0.5 and len(writes) == 2
    clock.now += 50
    file._drafter.add(prompt, samples[:2])
    assert file.write() == 0 and len(writes) == 2, "nothing is new"


def test_writing_counts_as_drafting(config, monkeypatch):
    monkeypatch.setattr(DraftFile, "write", lambda self: 7.0)
    worker = RolloutWorker(config, 0)
    list(worker.stream(WORK, step=1))
    assert worker.stats()["draft_seconds"] > 7
