"""One normalisation rule: however an update is cut into rows, whatever totals are first assumed, the gradient is the
same, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from infsample_rl.config import ObjectiveConfig
from infsample_rl.learner.advantage import group_advantages
from infsample_rl.learner.loss import loss_denominator, policy_loss
from infsample_rl.learner.row_plan import split_passes
from infsample_rl.model.logprobs import PackedPolicy
from infsample_rl.model.packing import pack_prompt, pack_samples
from infsample_rl.types import LossTotals, TrainingSample
from tests.tiny_models import reference_tokens

VOCAB, TEMPERATURE, NORMALIZER = 24, 0.7, 8
GROUP_SIZES = (4, 3, 2)


@pytest.fixture(scope="module")
def policy():
    """A random Qwen3 in float64, its norms too: Qwen3RMSNorm computes in float32 whatever its input is."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    lm = Qwen3ForCausalLM(
        Qwen3Config(**sizes, num_key_value_heads=1, head_dim=8, initializer_range=0.3, tie_word_embeddings=True)
    ).double()
    for module in list(lm.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ == "Qwen3RMSNorm":
                setattr(
                    module,
                    name,
                    torch.nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=torch.float64),
                )
    policy = PackedPolicy(lm, valid_vocab=VOCAB - 1, chunk_tokens=5, bad_token_ids=[3])
    policy.entropy_gradient = True
    return policy


@pytest.fixture(scope="module")
def samples(policy):
    """9 samples of 3 prompts, and by (prompt, sample) their old log-probabilities, off the policy by enough to be
    clipped."""
    generator = np.random.default_rng(1)
    made, old = [], {}
    for prompt, size in enumerate(GROUP_SIZES):
        prompt_ids = generator.integers(4, VOCAB - 1, 2 + prompt).astype(np.int32)
        for index in range(size):
            ids = generator.integers(4, VOCAB - 1, generator.integers(1, 8)).astype(np.int32)
            noise = [generator.normal(0, 0.3, len(ids)).astype(np.float32) for _ in range(3)]
            numbers = {
                "prompt_index": prompt,
                "sample_index": index,
                "prompt_ids": prompt_ids,
                "response_ids": ids,
                "advantages": (0.0,),
            }
            blank = TrainingSample(**numbers, engine_logprobs=noise[0], reference=reference_tokens(noise[0]))
            with torch.no_grad():
                logprobs = policy(pack_samples([blank], "cpu").row, TEMPERATURE)[0]
            old[prompt, index] = logprobs + torch.from_numpy(noise[2])
            own = logprobs.numpy().astype(np.float32)
            made.append(replace(blank, engine_logprobs=own + noise[0], reference=reference_tokens(own + noise[1])))
    return made, old


def totals_of(samples):
    return LossTotals(
        num_sequences=len(samples), num_tokens=sum(len(s.response_ids) for s in samples), length_normalizer=NORMALIZER
    )


def gradient_of(policy, rows, old, objective, totals, pass_tokens=None):
    """All gradients, one after another in one vector, accumulated over rows of samples, and the loss.

    `pass_tokens`: rows of one prompt above it are run in passes behind their prompt.
    """
    policy.zero_grad(set_to_none=True)
    total = 0.0
    for row in rows:
        one_prompt = len({sample.prompt_index for sample in row}) == 1
        passes, prompt = [row], None
        if pass_tokens is not None and one_prompt:
            passes = split_passes(row, pass_tokens)
        if len(passes) > 1:
            prompt = pack_prompt(row[0].prompt_ids, "cpu")
            policy(prompt, TEMPERATURE)
        for part in passes:
            total += accumulate(policy, part, prompt and prompt.cuts.shared, old, objective, totals)
        if prompt is not None:
            prompt.cuts.shared.gradient_carrier().backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]), total


def accumulate(policy, samples, shared, old, objective, totals):
    packed = pack_samples(samples, "cpu", shared)
    logprobs, entropy, *_ = policy(packed.row, TEMPERATURE)
    loss, _ = policy_loss(
        *(
            logprobs,
            torch.cat([old[sample.prompt_index, sample.sample_index] for sample in samples]),
            packed.advantages,
            packed.row.sequence_ids,
        ),
        objective=objective,
        totals=totals,
        ref_logprobs=packed.reference.logprobs,
        engine_logprobs=packed.engine_logprobs,
        entropy=entropy,
    )
    loss.backward()
    return loss.item()


REWARDS = st.tuples(
    *(st.lists(st.sampled_from([0.0, 1.0, 0.5, None]), min_size=size, max_size=size) for size in GROUP_SIZES)
)


@pytest.mark.parametrize("kl", [None, "k1", "k2", "k3"])
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
# shrinking a failure would take minutes
@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])
@given(data=st.data())
def test_any_split_of_an_update_gives_the_same_gradient(policy, samples, loss, kl, data):
    everything, old = samples
    importance = data.draw(st.sampled_from(["none", "token_tis", "sequence_tis"]))
    entropy_coef = data.draw(st.sampled_from([0.0, 0.05]))
    objective = ObjectiveConfig(
        loss=loss, importance=importance, importance_cap=1.2, entropy_coef=entropy_coef, kl_coef=0.1 if kl else 0.0
    )
    objective = replace(objective, kl=kl or objective.kl)
    rewards, dropped = data.draw(REWARDS), data.draw(st.sets(st.integers(0, 2)))
    advantages = [group_advantages(group, "std") for group in rewards]
    # A failed reward or a dropped group is outside every row and every total.
    kept = [
        s for s in everything if s.prompt_index not in dropped and rewards[s.prompt_index][s.sample_index] is not None
    ]
    kept = [replace(s, advantages=(advantages[s.prompt_index][s.sample_index],)) for s in kept]
    assume(kept)
    expected, expected_loss = gradient_of(policy, [[sample] for sample in kept], old, objective, totals_of(kept))

    # A group without signal is inside the totals, but need not be trained where its gradient is exactly zero.
    if kl is None and entropy_coef == 0.0 and data.draw(st.booleans()):
        trained = [s for s in kept if any(advantages[s.prompt_index])]
    else:
        trained = kept
    order = data.draw(st.permutations(trained)) if data.draw(st.booleans()) else trained
    starts = data.draw(st.lists(st.booleans(), min_size=len(order), max_size=len(order)))
    rows = []
    for sample, start in zip(order, starts, strict=True):
        if start or not rows:
            rows.append([])
        rows[-1].append(sample)
    assume(rows)
    policy.chunk_tokens = data.draw(st.integers(1, 9))
    counts = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 400)))
    provisional = LossTotals(num_sequences=counts[0], num_tokens=counts[1], length_normalizer=NORMALIZER)
    pass_tokens = data.draw(st.sampled_from([None, 11, 14, 20]))  # the longest prompt and response have 4 + 7
    gradient, value = gradient_of(policy, rows, old, objective, provisional, pass_tokens)
    factor = loss_denominator(objective, provisional) / loss_denominator(objective, totals_of(kept))
    assert (gradient * factor - expected).abs().max() < 1e-10
    assert value * factor == pytest.approx(expected_loss, abs=1e-10)
