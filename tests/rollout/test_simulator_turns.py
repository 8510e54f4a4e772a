"""Trajectories with tools, simulated: nothing computed twice where there is parking, no order under the bound, the
clock by hand, and the command."""

from __future__ import annotations

import json
import random

import pytest

from infsample_rl.commands import simulate
from infsample_rl.commands import simulate_turns as simulate_turns_command
from infsample_rl.commands.simulate_turns import TurnOptions
from infsample_rl.rollout.schedule import residents
from infsample_rl.rollout.schedule.residents import Residents
from infsample_rl.rollout.simulator_turns import Costs, Trajectory, least_seconds, simulate_turns

COSTS = Costs(step=1.0, row=0.1, prefill=0.01, park=0.001)
CAP = 400


def drawn(seed: int, prompts: int = 2, group_size: int = 12) -> list[list[Trajectory]]:
    """Trajectories of 1 to 6 turns, at most CAP tokens."""
    dice, groups = random.Random(seed), []
    for _ in range(prompts):
        groups.append([])
        for _ in range(group_size):
            turns = dice.randint(1, 6)
            lengths = tuple(dice.randint(1, 30) for _ in range(turns))
            observed = tuple(dice.randint(1, 40) for _ in range(turns - 1))
            tools = tuple(dice.choice([0.0, 0.5, 20.0]) for _ in range(turns - 1))
            groups[-1].append(Trajectory(lengths, observed, tools))
    return groups


def run(groups, *, full: int, **options):
    prompt_tokens = [20] * len(groups)
    budget = full * CAP + 80
    found = simulate_turns(
        groups, COSTS, kv_budget_tokens=budget, prompt_tokens=prompt_tokens, cap=CAP, page_size=8, **options
    )
    assert found.sampled_tokens == sum(sum(each.lengths) for group in groups for each in group)
    assert found.peak_kv_tokens <= budget
    assert found.seconds >= least_seconds(groups, COSTS, budget, prompt_tokens)
    return found


def test_the_clock_by_hand():
    """A prompt's prefill, 3 steps, the tool, an observation's prefill behind the stop token, 2 steps."""
    found = run([[Trajectory((3, 2), (4,), (7.0,))]], full=1)
    assert found.seconds == pytest.approx((1 + 0.2) + 3 * 1.1 + 7.0 + (1 + 0.04) + 2 * 1.1)
    assert (found.steps, found.idle_seconds, found.prefilled_tokens) == (5, 7.0, 24)
    assert found.waiting_kv_token_seconds == 7.0 * 8  # a page


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("full", [1, 2, 30])
def test_with_parking_nothing_is_computed_twice_and_a_prefix_cache_loses_what_does_not_fit(seed, full):
    groups = drawn(seed)
    lengths = [[float(each.tokens) for each in group] for group in groups]
    ours, told, theirs = (
        run(groups, full=full),
        run(groups, full=full, predicted=lengths),
        run(groups, full=full, first_come=True),
    )
    assert ours.recomputed_tokens == told.recomputed_tokens == 0
    assert (theirs.recomputed_tokens > 0) == (full < 30)
    assert (ours.peak_parked_tokens > 0) == (full < 30)


@pytest.mark.parametrize("parked", [0, 64, 320])
def test_where_parking_is_full_what_gave_way_is_computed_again_and_no_copy_is_of_more_than_was_held(
    parked, monkeypatch
):
    own = Residents._park

    def park(self, owner, pages, num_tokens):
        is_parked = own(self, owner, pages, num_tokens)
        assert not is_parked or len(pages) * self.pool.page_size >= num_tokens
        return is_parked

    monkeypatch.setattr(Residents, "_park", park)
    found = [run(drawn(seed, group_size=20), full=1, parked_budget_tokens=parked) for seed in range(4)]
    assert sum(each.recomputed_tokens for each in found) > 0
    assert max(each.peak_parked_tokens for each in found) <= parked


def test_a_trajectory_above_the_cap_and_a_budget_without_room_are_refused():
    with pytest.raises(ValueError, match="cap must be >= the longest trajectory = 401"):
        run([[Trajectory((401,), (), ())]], full=1)
    with pytest.raises(ValueError, match="kv_budget_tokens must be >= 424"):
        simulate_turns(drawn(0), COSTS, kv_budget_tokens=300, prompt_tokens=[20, 20], cap=CAP, page_size=8)


def test_the_command_reads_files_and_says_every_measurement(tmp_path, capsys):
    path = tmp_path / "turns.jsonl"
    lines = [
        {"prompt_tokens": 30, "lengths": [[5, 6], [9]], "observation_lengths": [[40], []], "tool_seconds": [[2], []]}
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines * 2))
    arguments = [f"turns={path}", "cap=256", "trajectories=1", "noise=[0,0.5]"]
    assert simulate.main([*arguments, "json=true"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = ["first_come", "token_budget", "token_budget, true lengths", "token_budget, sigma 0.5"]
    assert [record["name"] for record in records] == names
    assert all(record["seconds"] >= record["bound_seconds"] > 2 for record in records)
    assert simulate.main(arguments) == 0
    assert "2 prompts, 4 trajectories of 1.5 turns and 30 tokens" in capsys.readouterr().out
    assert simulate.main(["turns=generated", "prompts=1", "group_size=4", "cap=4096", "json=true"]) == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1: Expecting property name"),
        ('{"lengths": [[1]]}', "it has no 'observation_lengths'"),
        ('{"lengths": [[1, 2]], "observation_lengths": [[]], "tool_seconds": [[]]}', "n - 1 observation_lengths"),
        ('{"lengths": [[0]], "observation_lengths": [[]], "tool_seconds": [[]]}', "whole and >= 1, got 0"),
        ('{"lengths": [[1, 1]], "observation_lengths": [[1]], "tool_seconds": [[-1]]}', "must be >= 0, got -1"),
        ('{"lengths": [], "observation_lengths": [], "tool_seconds": []}', "it has no trajectory"),
        ("", "is empty"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path, refused, line, said):
    path = tmp_path / "turns.jsonl"
    path.write_text(line)
    assert said in refused(simulate.main, f"turns={path}")


def test_steps_that_take_no_time_are_refused(refused):
    assert "c0=0: must be > 0" in refused(simulate.main, "turns=generated", "c0=0")


def test_who_is_predicted_to_have_most_left_does_not_go_ahead_turn_by_turn():
    """All would be open at once, and above what may be parked."""
    options = TurnOptions(prompts=1, group_size=48, cap=8192, trajectories=2, noise=[0.0])
    of_none, told = list(simulate_turns_command.measure(simulate_turns_command.generated(options), options))[1:]
    assert of_none["recomputed_share"] == told["recomputed_share"] == 0
    assert told["seconds"] == pytest.approx(of_none["seconds"], rel=0.1)


def test_kv_of_who_waits_a_moment_is_kept(monkeypatch):
    options = TurnOptions(prompts=1, group_size=48, cap=8192, trajectories=2)
    workload = simulate_turns_command.generated(options)

    def parked() -> int:
        return list(simulate_turns_command.measure(workload, options))[1]["parked_tokens"]

    with_patience = parked()
    monkeypatch.setattr(residents, "PATIENCE", 0)
    assert 0 < with_patience < 0.8 * parked()
