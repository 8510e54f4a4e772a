"""Checkpoints: renamed into place, the last few kept, found on resume; a changed byte is seen wherever it lies."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest

from infsample_rl.controller import checkpoints
from infsample_rl.controller.checkpoints import (
    CHECKSUM_FILE,
    drop_old,
    find_checkpoint,
    find_damage,
    folders_after,
    lock_run_folder,
    read_state,
    set_aside_after,
    write_checkpoint,
    write_checksums,
)


def save(folder: str) -> None:
    Path(folder, "model.safetensors").write_text("weights")


def write(run_dir: Path, step: int, keep: int = 2) -> Path:
    folder = write_checkpoint(run_dir, {"step": step, "data": {"position": step}}, save)
    assert drop_old(run_dir, keep) == []
    return folder


def test_last_two_are_kept_and_auto_takes_the_newest(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["step_000002", "step_000003"]
    newest, warnings = find_checkpoint(tmp_path, "auto")
    assert newest is not None and warnings == [] and read_state(newest) == {"step": 3, "data": {"position": 3}}


def test_a_save_that_fails_leaves_the_last_one_and_nothing_half_done(tmp_path):
    write(tmp_path, 1)

    def full_disk(folder: str) -> None:
        save(folder)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left on device"):
        write_checkpoint(tmp_path, {"step": 2}, full_disk)
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["step_000001"]
    assert write(tmp_path, 2).name == "step_000002"


def test_old_checkpoints_are_told_by_number_and_a_link_or_one_that_cannot_go_harms_nothing(tmp_path, monkeypatch):
    for step in (999_999, 1_000_000):
        write(tmp_path, step)
    assert write(tmp_path, 1_000_001).name == "step_1000001"
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["step_1000000", "step_1000001"]
    elsewhere = tmp_path / "other_disk"
    (tmp_path / "checkpoints" / "step_1000000").rename(elsewhere)
    (tmp_path / "checkpoints" / "step_1000000").symlink_to(elsewhere)
    assert drop_old(tmp_path, 1) == [] and elsewhere.is_dir() and len(checkpoints.checkpoints(tmp_path)) == 1
    write(tmp_path, 1_000_002)

    def refuse(path):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("shutil.rmtree", refuse)
    (said,) = drop_old(tmp_path, 1)
    assert "step_1000001 could not be removed (Operation not permitted)" in said


def test_recordings_of_steps_that_are_done_again_are_set_aside_too(tmp_path):
    for step in (1, 2):
        (tmp_path / "recordings" / f"step_{step:06d}").mkdir(parents=True)
    set_aside_after(tmp_path, 1)
    assert [path.name for path in sorted((tmp_path / "recordings").iterdir())] == ["step_000001", "superseded"]


def test_a_folder_without_state_is_no_checkpoint(tmp_path):
    (tmp_path / "checkpoints" / "step_000009").mkdir(parents=True)
    with pytest.raises(ValueError, match="driver_state.json is missing; put one back, or begin in another run.dir"):
        find_checkpoint(tmp_path, "auto")
    assert read_state(write(tmp_path, 8))["step"] == 8
    found, (said,) = find_checkpoint(tmp_path, "auto")
    assert found == tmp_path / "checkpoints" / "step_000008" and "step_000009 is damaged" in said


def test_never_refuses_a_folder_that_holds_a_run(tmp_path):
    (tmp_path / "metrics.jsonl").touch()  # a start was refused before its first step
    assert find_checkpoint(tmp_path, "never") == (None, [])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="run.resume=never, but run.dir=.* already holds a run"):
        find_checkpoint(tmp_path, "never")
    (tmp_path / "metrics.jsonl").unlink()
    write(tmp_path, 1)
    with pytest.raises(ValueError, match="run.resume=never, but run.dir=.* already holds a run"):
        find_checkpoint(tmp_path, "never")


def test_a_wrong_path_lists_the_checkpoints_there_are(tmp_path):
    write(tmp_path, 4)
    with pytest.raises(ValueError, match="is not a checkpoint .*step_000004"):
        find_checkpoint(tmp_path, str(tmp_path / "checkpoints" / "step_000005"))
    assert find_checkpoint(tmp_path, str(tmp_path / "checkpoints" / "step_000004"))[0] is not None


def test_checkpoints_of_steps_that_are_done_again_are_set_aside_and_half_written_ones_dropped(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step, keep=3)
    (tmp_path / "checkpoints" / ".partial_step_000004").mkdir()
    (tmp_path / "checkpoints" / "step_000003_merged").mkdir()  # the user's own
    assert [path.name for path in folders_after(tmp_path / "checkpoints", 1)] == ["step_000002", "step_000003"]
    set_aside_after(tmp_path, 1)
    assert write(tmp_path, 2, keep=1).is_dir(), "pruning by name no longer drops it in favour of step 3"
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["step_000002"]
    assert (tmp_path / "checkpoints" / "step_000003_merged").is_dir()
    assert sorted(path.name for path in (tmp_path / "checkpoints" / "superseded").iterdir()) == [
        "step_000002",
        "step_000003",
    ]
    assert not (tmp_path / "checkpoints" / ".partial_step_000004").exists()


def test_a_save_that_went_to_another_nodes_disk_is_refused_and_nothing_is_pruned(tmp_path):
    write(tmp_path, 1)
    with pytest.raises(RuntimeError, match="run.dir must be a folder that every node shares"):
        write_checkpoint(tmp_path, {"step": 2}, lambda folder: None)
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["step_000001"]


def test_two_processes_cannot_share_a_run_folder(tmp_path):
    lock = lock_run_folder(tmp_path)
    with pytest.raises(ValueError, match="is in use by a running process; give another run.dir"):
        lock_run_folder(tmp_path)
    lock.close()
    lock_run_folder(tmp_path).close()


def test_a_file_system_without_locks_is_said_in_one_line(tmp_path, monkeypatch):
    def refuse(*_) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ValueError, match=r"run.dir=.* cannot be locked \(Function not implemented\): it needs a file"):
        lock_run_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [("model.safetensors", "weight"), ("model.safetensors", None), (CHECKSUM_FILE, None)],
    ids=["cut short", "file missing", "no checksums"],
)
def test_a_damaged_checkpoint_is_found_out_and_the_one_before_is_used(tmp_path, name, content):
    before, newest = write(tmp_path, 1), write(tmp_path, 2)
    (newest / name).unlink()
    if content is not None:
        (newest / name).write_text(content)
    found, [warning] = find_checkpoint(tmp_path, "auto")
    assert found == before and str(newest) in warning
    with pytest.raises(ValueError, match="step_000002 is damaged"):
        find_checkpoint(tmp_path, str(newest))


def test_a_checkpoint_set_aside_again_replaces_the_one_set_aside_before(tmp_path):
    for text in ("first", "second"):
        write_checkpoint(
            tmp_path,
            {"step": 2, "data": {}},
            lambda folder, text=text: Path(folder, "model.safetensors").write_text(text),
        )
        set_aside_after(tmp_path, 1)
    assert (tmp_path / "checkpoints/superseded/step_000002/model.safetensors").read_text() == "second"


def test_a_byte_changed_before_the_last_chunk_of_a_file_in_an_inner_folder_is_damage(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "CHUNK_BYTES", 4)
    inner = tmp_path / "training_state" / "optimizer.pt"
    inner.parent.mkdir()
    inner.write_bytes(b"0123456789ab")
    write_checksums(tmp_path)
    assert find_damage(tmp_path) is None
    inner.write_bytes(b"X123456789ab")
    assert find_damage(tmp_path) == "the bytes of training_state/optimizer.pt have changed"


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ("[]", "lists no file"),
        ("{}", "lists no file"),
        ('{"a": 3}', "cannot be read"),
        ('[["a"]]', "cannot be read"),
        ("3", "cannot be read"),
    ],
)
def test_a_list_of_another_shape_is_damage(tmp_path, listed, said):
    (tmp_path / "a").write_text("1")
    (tmp_path / CHECKSUM_FILE).write_text(listed)
    assert said in find_damage(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that cannot be read, even by root")
def test_a_file_that_the_disk_cannot_read_is_damage_and_named(tmp_path):
    (tmp_path / "a").write_text("1")
    write_checksums(tmp_path)
    (tmp_path / "a").unlink()
    (tmp_path / "a").symlink_to("/proc/self/mem")
    assert find_damage(tmp_path) == f"{tmp_path / 'a'} cannot be read (Input/output error)"
