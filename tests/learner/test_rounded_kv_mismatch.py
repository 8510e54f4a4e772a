"""With rounded KV in the engine, the mean difference of log-probabilities stops the run, in float32 too."""

from dataclasses import replace

import numpy as np
import pytest

from infsample_rl.config import LearnerConfig, ObjectiveConfig


def test_float32_with_rounded_kv_stops_on_the_mean_alone(tools, untied_policy):
    samples = tools.make_samples(tools.load_plain(untied_policy))
    plain = tools.make_config(
        untied_policy,
        learner=LearnerConfig(max_tokens_per_micro_batch=256, logprob_chunk_tokens=7),
        objective=ObjectiveConfig(kl="none", importance="token_tis", mismatch_stop=0.05),
    )
    rounded = replace(plain, rollout=replace(plain.rollout, kv_dtype="int8"))
    assert (plain.mismatch_is_rounding, rounded.mismatch_is_rounding) == (True, False)
    totals = tools.totals_of(samples)

    def calls(shift):
        shifted = [replace(sample, engine_logprobs=sample.engine_logprobs + np.float32(shift)) for sample in samples]
        return [("accumulate", (shifted, totals)), ("step", (totals,))]

    with pytest.raises(RuntimeError, match="objective.mismatch_stop_float32=0.0001"):
        tools.run_here(plain, calls(0.02))
    step = tools.run_here(rounded, calls(0.02))[1]
    assert (
        step["learner/logprob_diff_mean"] == pytest.approx(0.02, rel=0.01) and step["learner/logprob_diff_max"] > 0.0199
    )
    with pytest.raises(
        RuntimeError, match=r"differ by 0\.2 in the mean log-probability of a token, above objective.mismatch_stop=0.05"
    ):
        tools.run_here(rounded, calls(0.2))
