"""The learner's policy is the engine's: the same ids masked, the same head."""

from dataclasses import replace

import pytest
import torch

from infsample_rl.config import LearnerConfig
from tests.tiny_models import reference_tokens

BAD = [0, 7, 31]
LEARNER = LearnerConfig(lr=1e-3, max_tokens_per_micro_batch=256, logprob_chunk_tokens=7)


def masked_samples(tools, path):
    """Samples without bad ids whose engine log-probabilities are of the policy over the other ids, and its mean
    entropy."""
    lm = tools.load_plain(path)
    drawn, samples = tools.make_samples(lm), []
    lm.lm_head.register_forward_hook(lambda _module, _inputs, logits: logits.index_fill(-1, torch.tensor(BAD), -1e9))
    for sample in drawn:
        ids = sample.response_ids.copy()
        ids[[token in BAD for token in ids]] = 8
        with torch.no_grad():
            engine, entropy = tools.plain_logprobs(lm, sample.prompt_ids, ids)
        engine = engine.numpy()
        own = replace(sample, response_ids=ids, engine_logprobs=engine, reference=reference_tokens(engine))
        samples.append((own, entropy))
    return [sample for sample, _ in samples], torch.cat([entropy for _, entropy in samples]).mean().item()


def config_with(tools, path, bad, **settings):
    config = tools.make_config(path, learner=LEARNER, **settings)
    return replace(config, rollout=replace(config.rollout, bad_token_ids=bad))


def test_bad_ids_have_no_probability_in_the_learner_either(tools, untied_policy):
    samples, entropy = masked_samples(tools, untied_policy)
    totals = tools.totals_of(samples)
    calls = [("accumulate", (samples, totals)), ("step", (totals,))]
    _, step = tools.run_here(config_with(tools, untied_policy, BAD), calls)
    assert step["learner/logprob_diff_max"] < 1e-5
    assert step["learner/entropy"] == pytest.approx(entropy, rel=1e-5)
    with pytest.raises(RuntimeError, match="they do not run the same policy"):
        tools.run_here(config_with(tools, untied_policy, []), calls)
