"""Checksums see a changed byte wherever it lies."""

from __future__ import annotations

from infsample_rl import checksums


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
