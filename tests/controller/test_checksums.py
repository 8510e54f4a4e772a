"""Checksums see a changed byte wherever it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from infsample_rl.controller import checksums


def test_a_byte_changed_before_the_last_chunk_is_damage(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "_CHUNK", 4)
    (tmp_path / "w").write_bytes(b"0123456789ab")
    checksums.write_checksums(tmp_path)
    assert checksums.find_damage(tmp_path) is None
    (tmp_path / "w").write_bytes(b"X123456789ab")
    assert checksums.find_damage(tmp_path) == "the bytes of w have changed"


def test_files_of_inner_folders_are_checked(tmp_path):
    inner = tmp_path / "training_state" / "optimizer.pt"
    inner.parent.mkdir()
    inner.write_bytes(b"abc")
    checksums.write_checksums(tmp_path)
    assert checksums.find_damage(tmp_path) is None
    inner.write_bytes(b"abX")
    assert checksums.find_damage(tmp_path) is not None


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
    (tmp_path / checksums.CHECKSUM_FILE).write_text(listed)
    assert said in checksums.find_damage(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that cannot be read, even by root")
def test_a_file_that_the_disk_cannot_read_is_damage_and_named(tmp_path):
    (tmp_path / "a").write_text("1")
    checksums.write_checksums(tmp_path)
    (tmp_path / "a").unlink()
    (tmp_path / "a").symlink_to("/proc/self/mem")
    assert checksums.find_damage(tmp_path) == f"{tmp_path / 'a'} cannot be read (Input/output error)"
