"""Tokens of a response that were observed, not sampled: they are read and not trained, whatever rows and passes."""

from dataclasses import replace

import numpy as np
import pytest

from infsample_rl.config import LearnerConfig, ObjectiveConfig
from infsample_rl.learner.row_plan import split_passes
from tests.tiny_models import assert_tensors_close, reference_tokens


def with_observations(samples):
    """Of every second response longer than 3 its tokens 1 and 2."""
    found = []
    for number, sample in enumerate(samples):
        if number % 2 == 0 and len(sample.response_ids) > 3:
            logprobs = sample.engine_logprobs.copy()
            logprobs[1:3] = np.nan
            kept = ~np.isnan(logprobs)
            reference = reference_tokens(sample.reference.logprobs[kept])
            sample = replace(sample, engine_logprobs=logprobs, reference=reference)
        found.append(sample)
    assert any(not sample.sampled.all() for sample in found)
    return found


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize(("max_tokens", "by_turn"), [(256, False), (32, False), (32, True)])
def test_they_are_read_and_not_trained(tools, tied_policy, loss, max_tokens, by_turn):
    objective = ObjectiveConfig(loss=loss, kl_coef=0.1)
    lm = tools.load_plain(tied_policy)
    samples = with_observations(tools.make_samples(lm))
    if by_turn:
        samples = [each if each.sampled.all() else replace(each, advantages=(2.0, -1.5)) for each in samples]
    totals = tools.totals_of(samples)
    _, expected = tools.plain_gradients(lm, samples, objective)
    learner = LearnerConfig(lr=1e-3, max_tokens_per_micro_batch=max_tokens, logprob_chunk_tokens=7)
    groups = [[sample for sample in samples if sample.prompt_index == index] for index in range(3)]
    calls = [("accumulate", (part, totals)) for group in groups for part in [group]]
    found = tools.run_here(
        tools.make_config(tied_policy, learner=learner, objective=objective), [*calls, ("gradients", ())]
    )
    assert_tensors_close({name: found[-1][name] for name in expected}, expected, rtol=1e-4, atol=1e-6)
    if max_tokens == 32:
        assert any(len(split_passes(group, max_tokens)) > 1 for group in groups), "in passes behind their prompt"


def test_a_response_of_which_nothing_was_sampled_is_refused(tools, tied_policy):
    sample = tools.make_samples(tools.load_plain(tied_policy))[0]
    blank = replace(sample, engine_logprobs=np.full_like(sample.engine_logprobs, np.nan))
    with pytest.raises(ValueError, match="cannot pack a response of which no token was sampled"):
        tools.run_here(tools.make_config(tied_policy), [("accumulate", ([blank], tools.totals_of([blank])))])
