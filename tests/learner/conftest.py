"""A tiny policy, samples of it, the plain one-sample-at-a-time GRPO they are compared with."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from infsample_rl.config import LearnerConfig, ObjectiveConfig
from infsample_rl.learner.loss import policy_loss
from infsample_rl.learner.optimizer import lr_at
from infsample_rl.learner.reference import ReferenceWorker
from infsample_rl.types import LossTotals, TrainingSample
from tests import tiny_models
from tests.configs import run_config
from tests.learner_ranks import Scenario, run_scenario
from tests.tiny_models import TINY_SIZES, finished, prompt_of, reference_tokens, save_words

TEMPERATURE = 0.7
VALID_VOCAB = 60  # the model's head has 64 rows

# How two ranks may share the policy: the settings of the learner that differ. Each runs the test of ten updates.
BACKENDS = {
    "fsdp": {},
    "fsdp last_row": {"grad_sync": "last_row"},
    "fsdp shard_ranks 1": {"shard_ranks": 1},
}
if importlib.util.find_spec("deepspeed") is not None:
    BACKENDS |= {f"deepspeed zero {stage}": {"backend": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)}
# ZeRO 3 is in the fast half by the real command (tests/runs/test_matrix.py).
SLOW_BACKENDS = tuple(name for name in BACKENDS if name != "fsdp")
# Rows of the two ranks in each of ten updates.
DEALS = [(3, 1), (1, 0), (2, 2), (0, 3), (1, 1), (3, 0), (1, 3), (0, 1), (4, 1), (2, 0)]


def save_tiny_policy(folder: Path, *, tied: bool) -> str:
    """A random 2-layer Qwen3 with a tokenizer of 60 words."""
    torch.manual_seed(3)
    config = Qwen3Config(
        **TINY_SIZES,
        **{"head_dim": 16, "max_position_embeddings": 128, "tie_word_embeddings": tied},
        **{"initializer_range": 0.15, "attention_dropout": 0.5, "eos_token_id": 1},
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    save_words(folder, VALID_VOCAB)
    return str(folder)


plain_logprobs = partial(tiny_models.plain_logprobs, temperature=TEMPERATURE, valid_vocab=VALID_VOCAB)


def make_samples(lm, *, seed=0, prompts=3, group_size=4, with_reference=True):
    """prompts x group_size samples whose engine log-probabilities are the policy's own."""
    generator = np.random.default_rng(seed)
    samples = []
    for prompt_index in range(prompts):
        prompt_ids = generator.integers(0, VALID_VOCAB, 3 + 2 * prompt_index).astype(np.int32)
        for sample_index in range(group_size):
            response_ids = generator.integers(0, VALID_VOCAB, generator.integers(1, 12)).astype(np.int32)
            with torch.no_grad():
                engine = plain_logprobs(lm, prompt_ids, response_ids)[0].float().numpy()
            noise = generator.normal(0, 0.2, len(response_ids)).astype(np.float32)
            samples.append(
                TrainingSample(
                    prompt_index=prompt_index,
                    sample_index=sample_index,
                    prompt_ids=prompt_ids,
                    response_ids=response_ids,
                    advantages=(float(generator.normal()),),
                    engine_logprobs=engine,
                    reference=reference_tokens(engine + noise) if with_reference else None,
                )
            )
    return samples


def with_reference(config, samples):
    """The samples with what a reference worker says of them."""
    worker = ReferenceWorker(config)
    found = []
    for sample in samples:
        prompt = prompt_of(0, sample.prompt_ids)
        completion = finished(0, 0, sample.response_ids, sample.engine_logprobs)
        found.append(replace(sample, reference=worker.logprobs(prompt, [completion]).tokens[0]))
    return found


def totals_of(samples):
    """The exact denominators of these samples."""
    tokens = sum(int(sample.sampled.sum()) for sample in samples)
    return LossTotals(num_sequences=len(samples), num_tokens=tokens, length_normalizer=16)


def plain_gradients(lm, samples, objective):
    """Loss and gradients of one update, one sample at a time, without packing, sharding or chunks; tokens that were
    observed take no part. The second turn of two begins at token 3."""
    lm.zero_grad()
    total = 0.0
    for sample in samples:
        kept = np.flatnonzero(sample.sampled)
        logprobs = plain_logprobs(lm, sample.prompt_ids, sample.response_ids)[0][kept]
        advantages = logprobs.new_tensor([sample.advantages[-1 if token > 2 else 0] for token in kept])
        reference = torch.from_numpy(sample.reference.logprobs)
        ids = torch.zeros(len(logprobs), dtype=torch.long)
        loss, _ = policy_loss(
            logprobs,
            logprobs.detach(),
            advantages,
            ids,
            objective=objective,
            totals=totals_of(samples),
            ref_logprobs=reference,
        )
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad.clone() for name, parameter in lm.named_parameters() if parameter.requires_grad}


def make_config(path, *, learner=None, objective=None, dtype="float32", deterministic=False, ranks=1):
    """A whole config around the tiny policy."""
    return run_config(
        run={"deterministic": deterministic},
        model={"path": path, "dtype": dtype},
        data={"max_prompt_tokens": 16},
        rollout={"group_size": 4, "max_new_tokens": 16, "temperature": TEMPERATURE},
        objective=objective or {"kl_coef": 0.1},
        learner=learner or {"lr": 1e-3, "max_tokens_per_micro_batch": 256, "logprob_chunk_tokens": 7},
        cluster={"progress_timeout_s": 120.0, "learner_ranks": ranks},
    )


def large_update(path, dtype, loss):
    """A few samples that count as those of an update of 64 prompts x 256 samples of 4,096 tokens, of which each token's
    share underflows in 16 bits: (config, samples, provisional totals, real ones)."""
    samples = make_samples(load_plain(path, torch.float16))
    objective = ObjectiveConfig(loss=loss, kl_coef=0.0, mismatch_stop=9.0, mismatch_stop_float32=9.0)
    learner = LearnerConfig(lr=1e-3, max_tokens_per_micro_batch=8192, logprob_chunk_tokens=7)
    config = make_config(path, dtype=dtype, objective=objective, learner=learner)
    config = replace(
        config,
        data=replace(config.data, prompts_per_step=64),
        rollout=replace(config.rollout, group_size=256, max_new_tokens=4096),
    )
    provisional = LossTotals(num_sequences=2**14, num_tokens=2**14 * 4096, length_normalizer=4096)
    return config, samples, provisional, replace(totals_of(samples), length_normalizer=4096)


def run_here(config, calls, **settings):
    """Run a scenario as the only rank, in this process."""
    return run_scenario(Scenario(config, calls, **settings), 0, 1)


def pytest_generate_tests(metafunc):
    """A test that takes `backend` runs for each of BACKENDS, and for rows in passes on two ranks that run free."""
    if "backend" in metafunc.fixturenames:
        names = [*BACKENDS, "passes"]
        slow = {name: pytest.mark.slow if name in SLOW_BACKENDS else () for name in names}
        metafunc.parametrize("backend", [pytest.param(name, marks=slow[name]) for name in names])


@pytest.fixture(scope="session")
def tied_policy(tmp_path_factory):
    """Folder of the tiny policy with tied embeddings."""
    return save_tiny_policy(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied_policy(tmp_path_factory):
    """Folder of the tiny policy with its own head."""
    return save_tiny_policy(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def tools():
    """The functions of this file, for test files that cannot import it."""
    return sys.modules[__name__]


def load_plain(path, dtype=torch.float32):
    """The policy as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def plain_updates(path, objective, learner, count=10, lm=None):
    """Updates of plain AdamW on one process, of a run of ten: [(samples, loss, gradient norm)], trained parameters
    after the last. `lm`: what is trained, the policy of `path` by default."""
    lm = lm or load_plain(path)
    trained = {name: parameter for name, parameter in lm.named_parameters() if parameter.requires_grad}
    matrices = [parameter for parameter in trained.values() if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained.values() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": learner.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learner.lr, betas=(learner.beta1, learner.beta2), eps=learner.adam_epsilon)
    history = []
    for update in range(count):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(update, 10, learner)
        samples = make_samples(lm, seed=update)
        loss, _ = plain_gradients(lm, samples, objective)
        norm = torch.nn.utils.clip_grad_norm_(lm.parameters(), learner.max_grad_norm).item()
        optimizer.step()
        history.append((samples, loss, norm))
    return history, {name: parameter.detach().clone() for name, parameter in trained.items()}


def cut(samples, count):
    """`count` rows of neighbouring samples."""
    bounds = [round(i * len(samples) / count) for i in range(count + 1)]
    return [samples[start:end] for start, end in zip(bounds, bounds[1:], strict=False)] if count else []


def deal(samples, counts):
    """Rows for every rank: counts[rank] of them."""
    rows = cut(samples, sum(counts))
    return [[rows.pop(0) for _ in range(count)] for count in counts]


def figures(metrics):
    """Metrics of an update but for memory, which every process measures of itself."""
    return {name: value for name, value in metrics.items() if not name.startswith("memory/")}


def waves(rows_by_rank, totals, *, lockstep=True, numbered=False):
    """accumulate calls of an update: a rank without a row in a wave gets None, or, without lockstep, no call. Rows that
    are `numbered` are (row, its id)."""
    rounds = max(len(rows) for rows in rows_by_rank)
    call = (lambda row: (row[0], totals, row[1])) if numbered else (lambda row: (row, totals))
    filler = [call((None, None) if numbered else None)] if lockstep else [None]
    padded = [[*map(call, rows), *filler * (rounds - len(rows))] for rows in rows_by_rank]
    return [("accumulate", [calls[number] for calls in padded]) for number in range(rounds)]
