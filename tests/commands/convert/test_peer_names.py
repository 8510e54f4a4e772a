"""A peer's name given as a setting: the error says what it is here."""

from __future__ import annotations

import pytest

from infsample_rl.main import main


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("num_generations=8", "num_generations is not a setting: TRL's num_generations is rollout.group_size here"),
        ("learner.learning_rate=1", "learner.learning_rate is not a setting: TRL's learning_rate is learner.lr here"),
        ("actor_rollout_ref.rollout.n=8", "verl's actor_rollout_ref.rollout.n is rollout.group_size here"),
        ("rollout.slot=8", "rollout.slot is not a setting; did you mean rollout.slots?"),
    ],
)
def test_a_peers_name_is_told_in_ours(given, said, capsys):
    assert main(["--cfg", "job", given]) == 2
    assert said in capsys.readouterr().err
