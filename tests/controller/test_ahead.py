"""Samples that a checkpoint keeps for the next step come back as they were."""

from __future__ import annotations

import json

import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from infsample_rl.controller import ahead, recording
from infsample_rl.types import Completion, Episode
from tests.tiny_models import finished

TALK = [{"role": "user", "content": "\u03b1 \ud800 " * 1000}]


def completion(index: int) -> Completion:
    episode = Episode(reward=0.5, failure="", turns=1, calls=0, waited_s=0.0, messages=TALK)
    return finished(0, index, range(index + 2), policy_version=3, episode=episode)


@pytest.mark.parametrize("facts_in_header", [False, True], ids=["now", "older"])
def test_micro_groups_come_back_and_what_was_said_has_no_bound(tmp_path, facts_in_header):
    micro_groups = [[completion(0), completion(1)], [completion(2)]]
    ahead.write_ahead(tmp_path, micro_groups)
    file = tmp_path / ahead.FILE
    assert int.from_bytes(file.read_bytes()[:8], "little") < 2000, "the header is bounded by 100 MB"
    if facts_in_header:
        arrays = load_file(file)
        save_file(arrays, file, metadata={"facts": arrays.pop("facts").tobytes().decode()})
        with safe_open(file, "numpy") as older:
            assert json.loads(older.metadata()["facts"])["policy_version"] == 3
    found = ahead.read_ahead(tmp_path)
    assert [[each.token_ids.tolist() for each in group] for group in found] == [[[0, 1], [0, 1, 2]], [[0, 1, 2, 3]]]
    assert [[each.episode for each in group] for group in found] == [[one.episode for one in g] for g in micro_groups]


def test_a_full_disk_is_an_os_error(tmp_path, monkeypatch):
    def no_room(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(recording, "save_file", no_room)
    with pytest.raises(OSError, match="ahead.safetensors cannot be written: .*No space left on device"):
        ahead.write_ahead(tmp_path, [[completion(0)]])
