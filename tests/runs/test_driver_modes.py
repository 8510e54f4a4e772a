"""The ways a step can be arranged, with the real command on Ray: same samples, same update, or exactly the difference
that was asked for."""

from __future__ import annotations

import pytest

from tests.real_runs import same_everywhere


@pytest.fixture(scope="module")
def apart(train):
    return train("run.deterministic=true", "learner.overlap=false").rows


@pytest.mark.slow
def test_colocated_trains_the_same_and_moves_no_weights(train, apart):
    rows, output, _ = train("run.deterministic=true", "learner.overlap=false", "cluster.colocate=true")
    assert "shares the learner's weights" in output
    assert [same_everywhere(row) for row in rows] == [same_everywhere(row) for row in apart]  # bitwise
    assert [row["weight_sync/bytes"] for row in rows] == [0, 0] and apart[0]["weight_sync/bytes"] > 100_000


@pytest.mark.slow
def test_backward_begins_before_the_last_token_is_sampled_and_the_update_is_the_same(train, apart):
    # the slowest there is, so that the lead is sure
    one_slot = ["rollout.schedule=arrival", "rollout.slots=1", "rollout.prompts_at_once=1"]
    rows, *_ = train("cluster.colocate=true", *one_slot)
    # In one step at least: in the other the reward worker may have been kept waiting for a core.
    assert any(row["timing/backward_lead"] > 0 and row["timing/overlap"] > 0 for row in rows)
    assert all(row["timing/overlap"] == 0 for row in apart)
    for row, expected in zip(rows, apart, strict=True):
        assert row["response/tokens"] == expected["response/tokens"] and row["reward/mean"] == expected["reward/mean"]
        for name in ("learner/loss", "learner/grad_norm", "learner/entropy"):
            assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6)


@pytest.mark.slow
def test_one_step_off_policy_trains_samples_of_the_weights_before_with_importance_weights(train, apart):
    rows, *_ = train("run.max_staleness=1", "run.steps=3")
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1]
    assert rows[0]["reward/mean"] == apart[0]["reward/mean"]  # the first step is on policy
    assert rows[0]["learner/logprob_diff_max"] < 1e-4 < rows[1]["learner/logprob_diff_max"]
    assert (
        rows[0]["learner/importance_mean"] == pytest.approx(1, abs=1e-5)
        and abs(rows[1]["learner/importance_mean"] - 1) > 1e-5
    )
    assert rows[1]["learner/engine_ess"] < rows[0]["learner/engine_ess"] == pytest.approx(1, abs=1e-6)


@pytest.mark.slow
def test_several_updates_a_step_clip_against_the_policy_of_its_first_pass(train, apart):
    for ranks in ("1", "2"):
        clip = ["objective.clip_low=1e-4", "objective.clip_high=1e-4"]
        rows, *_ = train("objective.epochs=2", "objective.mini_batches=3", *clip, f"cluster.learner_ranks={ranks}")
        assert [row["learner/updates"] for row in rows] == [6, 6] and all(row["timing/overlap"] == 0 for row in rows)
        assert rows[0]["reward/mean"] == apart[0]["reward/mean"]
        assert rows[0]["learner/clip_fraction"] > 0.1, "later updates are off the policy of the first pass"
        assert rows[0]["learner/logprob_diff_max"] < 1e-4, "the engine is compared with the first pass"


@pytest.mark.slow
def test_groups_without_signal_are_replaced_by_new_prompts(train, reward_file):
    settings = ["objective.dynamic_sampling=true", f"reward.functions=[{{name: '{reward_file}:rarely'}}]"]
    rows, *_ = train(*settings, "run.steps=1")
    assert rows[0]["rollout/rounds"] > 1
    assert rows[0]["response/tokens"] > 0 and rows[0]["reward/groups_with_signal"] < 1
    rows, output, _ = train(*settings, "objective.dynamic_sampling_rounds=1")
    assert "groups have a signal after 1 rounds of sampling" in output and len(rows) == 2, "at the cap the run goes on"
