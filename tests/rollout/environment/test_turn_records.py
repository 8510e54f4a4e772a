"""Answers of environments that were kept: taken by whoever samples a trajectory again, and by nobody else."""

import json

import pytest

from infsample_rl.config.environment import EnvironmentConfig
from infsample_rl.rollout.environment.turn_records import FOLDER, TurnRecords, fingerprint, forget_turns

CALL = ("call", [("add", {"a": 2})])
REPLY = {"said": ["It is 2."], "failed": 0}
PLACE = (4, 1, 11, 1)  # prompt, sample, seed, number


def records(folder, step=3, evaluation=False, made_by="one"):
    return TurnRecords(folder, step=step, evaluation=evaluation, made_by=made_by)


@pytest.fixture
def kept(tmp_path):
    own = records(tmp_path)
    own.add(PLACE, CALL, REPLY)
    own.add((4, 1, 11, 2), ("reward",), {"reward": 0.5})
    own.add((4, 2, 11, 1), CALL, {"failed": "its process ended"})
    own.close()
    return tmp_path


def test_an_answer_is_found_again_for_the_same_request_of_the_same_step_alone(kept):
    found = records(kept)
    assert found.find(PLACE, CALL) == REPLY and found.find((4, 1, 11, 2), ("reward",)) == {"reward": 0.5}
    others = [(4, 2, 11, 1), (5, 1, 11, 1), (4, 1, 12, 1), (4, 1, 11, 3)]  # the first has failed: asked again
    assert all(found.find(place, CALL) is None for place in others)
    assert found.find(PLACE, ("call", [("add", {"a": 3})])) is None
    for other in (records(kept, step=4), records(kept, evaluation=True), records(kept, made_by="two")):
        assert other.find(PLACE, CALL) is None


def test_two_streams_of_a_step_write_apart_and_a_torn_line_is_left_out(kept):
    other = records(kept)
    other.add((4, 3, 11, 1), CALL, REPLY)
    other.close()
    paths = list((kept / FOLDER / "step_000003").glob("*.jsonl"))
    assert len(paths) == 2
    with paths[0].open("a") as file:
        file.write(json.dumps({"step": 3})[:-1])
    found = records(kept)
    assert found.find(PLACE, CALL) == found.find((4, 3, 11, 1), CALL) == REPLY


def test_a_stream_that_asks_nothing_writes_nothing(tmp_path):
    records(tmp_path).close()
    assert not (tmp_path / FOLDER).exists()


def test_where_nothing_can_be_written_it_is_said_once_and_the_stream_goes_on(tmp_path):
    (tmp_path / FOLDER).write_text("no folder")
    own = records(tmp_path)
    with pytest.warns(UserWarning, match="are not kept, after a crash they are asked again") as said:
        own.add(PLACE, CALL, REPLY)
        own.add(PLACE, CALL, REPLY)
    assert len(said) == 1
    own.close()


def test_what_is_done_is_forgotten_and_nothing_else(kept):
    records(kept, step=7).add(PLACE, CALL, REPLY)
    records(kept, step=5, evaluation=True).add(PLACE, CALL, REPLY)
    (kept / FOLDER / "notes_of_mine").mkdir()
    forget_turns(kept, 5)
    assert sorted(path.name for path in (kept / FOLDER).iterdir()) == [
        "evaluation_000005",
        "notes_of_mine",
        "step_000007",
    ]
    forget_turns(kept)
    assert not (kept / FOLDER).exists()
    forget_turns(kept)


def test_the_fingerprint_is_that_of_the_files(tmp_path):
    path = tmp_path / "game.py"
    path.write_text("class Game: ...")
    one = fingerprint(EnvironmentConfig(factory=f"{path}:Game"))
    assert fingerprint(EnvironmentConfig(factory=f"{path}:Game", max_turns=3)) == one
    assert fingerprint(EnvironmentConfig(tools=[f"{path}:Game"])) != one
    assert fingerprint(EnvironmentConfig(factory=f"{path}:Game"), [f"{path}:score"]) != one
    path.write_text("class Game: pass")
    assert fingerprint(EnvironmentConfig(factory=f"{path}:Game")) != one
