"""On-policy distillation: the gradient is, in the mean over what may be sampled, that of the exact reverse KL."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from infsample_rl.config import ObjectiveConfig
from infsample_rl.config.loading import ConfigError, load_config
from infsample_rl.learner.divergence import likely_kl
from infsample_rl.learner.loss import policy_loss
from infsample_rl.model.tokenizer import check_reference, load_tokenizer
from infsample_rl.types import LossTotals
from tests.tiny_models import assert_tensors_close, save_words

TOKENS, VOCAB = 5, 7
# What TRL 1.16.0's GKD gives for the logits below, of the whole vocabulary.
TRL_BETA = {"reverse": 1, "forward": 0}
TRL_LOSS = {"reverse": 1.2048326483461231, "forward": 1.0942811294433012}


def logits(seed):
    return torch.randn(TOKENS, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mean_gradient(objective, advantage=0.0):
    """Of `policy_loss` over all tokens that the student may draw at every place, each weighted by its probability."""
    student, teacher = logits(0).requires_grad_(), logits(1).log_softmax(-1)
    totals = LossTotals(num_sequences=1, num_tokens=TOKENS, length_normalizer=TOKENS)
    total = torch.zeros(TOKENS, VOCAB, dtype=torch.float64)
    for token in range(VOCAB):
        logprobs = student.log_softmax(-1)[:, token]
        old = logprobs.detach()
        loss, metrics = policy_loss(
            logprobs, old, torch.full((TOKENS,), advantage, dtype=torch.float64), torch.zeros(TOKENS, dtype=torch.long),
            objective=objective, totals=totals, ref_logprobs=teacher[:, token],
        )  # fmt: skip
        assert metrics["kl"] == pytest.approx((old - teacher[:, token]).mean().item(), rel=1e-12)
        (gradient,) = torch.autograd.grad(loss, student)  # a place's gradient depends on its own token alone
        total += old.exp()[:, None] * gradient
    return total


def reverse_kl(student, teacher):
    return F.kl_div(teacher.log_softmax(-1), student.log_softmax(-1), reduction="sum", log_target=True) / TOKENS


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo"])
def test_its_gradient_is_that_of_the_reverse_kl(loss):
    student = logits(0).requires_grad_()
    (wanted,) = torch.autograd.grad(reverse_kl(student, logits(1)), student)
    objective = ObjectiveConfig(loss=loss, kl_coef=0.0, reward_coef=0.0, distill_coef=0.5)
    torch.testing.assert_close(mean_gradient(objective, advantage=3.0), 0.5 * wanted, rtol=0, atol=1e-12)


def trl_kl(student, teacher, beta):
    from trl.experimental.gkd import GKDTrainer

    labels = torch.zeros(1, TOKENS, dtype=torch.long)
    return GKDTrainer.generalized_jsd_loss(student.detach()[None], teacher[None], labels=labels, beta=beta).item()


@pytest.mark.peers
def test_the_reverse_kl_is_trls_loss_at_beta_1():
    peer = trl_kl(logits(0), logits(1), 1)
    assert peer == pytest.approx(reverse_kl(logits(0), logits(1)).item(), rel=1e-12)


def distribution(seed, kind="student"):
    """Of a student, or of a teacher whose likeliest ids hold most."""
    return (logits(seed) * (3.0 if kind == "teacher" else 1.0)).log_softmax(-1)


def kl_of_all_ids(student, teacher, kind):
    ids = torch.stack([torch.randperm(VOCAB, generator=torch.Generator().manual_seed(row)) for row in range(TOKENS)])
    return likely_kl(student.log_softmax(-1).gather(-1, ids), teacher.gather(-1, ids), kind).sum()


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_of_all_ids_it_is_the_whole_kl(kind):
    student, teacher = logits(0).requires_grad_(), distribution(1, "teacher")
    own = kl_of_all_ids(student, teacher, kind)
    pair = (teacher, student.log_softmax(-1)) if kind == "reverse" else (student.log_softmax(-1), teacher)
    wanted = F.kl_div(*pair, reduction="sum", log_target=True)
    assert own.item() == pytest.approx(wanted.item(), rel=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(each, student)[0] for each in (own, wanted)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", TRL_LOSS)
def test_of_all_ids_it_is_trls_loss(kind):
    own = kl_of_all_ids(logits(0), distribution(1, "teacher"), kind)
    assert own.item() / TOKENS == pytest.approx(TRL_LOSS[kind], rel=1e-12)


@pytest.mark.peers
@pytest.mark.parametrize("kind", TRL_LOSS)
def test_trls_loss_is_what_was_recorded(kind):
    assert trl_kl(logits(0), distribution(1, "teacher"), TRL_BETA[kind]) == pytest.approx(TRL_LOSS[kind], rel=1e-12)


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_of_fewer_ids_it_is_less_and_never_below_zero(kind):
    student, teacher = distribution(0), distribution(1, "teacher")
    found = []
    for k in range(1, VOCAB + 1):
        likely, ids = teacher.topk(k)
        found.append(likely_kl(student.gather(-1, ids), likely, kind))
        assert likely_kl(likely, likely, kind).abs().max() < 1e-12
    for fewer, more in zip(found, found[1:], strict=False):
        assert (fewer >= 0).all() and (fewer <= more + 1e-12).all()
    assert (found[2] < found[-1]).all()


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_where_float32_leaves_no_rest_its_gradient_stays_small(kind):
    exact = torch.randn(50, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    student = exact.float().requires_grad_()
    teacher = (exact + 0.01).float().log_softmax(-1)  # the same
    likely_kl(student.log_softmax(-1), teacher, kind).sum().backward()
    assert student.grad.abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["reverse", "forward"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_learner_follows_the_teacher_wherever_it_is(tools, tied_policy, untied_policy, kind, epochs):
    """By what reference workers say of every sample, and by a teacher on the learner ranks: the same loss, KL and
    gradient, which are the plain ones."""
    objective = ObjectiveConfig(
        loss="dapo", kl_coef=0.0, reward_coef=0.0, distill_coef=0.5, distill_top_k=6, distill_kl=kind, epochs=epochs
    )
    config = tools.make_config(untied_policy)
    config = replace(config, objective=objective, reference=replace(config.reference, path=tied_policy))
    samples = tools.make_samples(tools.load_plain(untied_policy), with_reference=False)
    given = tools.with_reference(config, samples)
    here = replace(config, reference=replace(config.reference, placement="learner"))
    totals = tools.totals_of(samples)
    found = []
    for of, rows in ((config, given), (here, samples)):
        calls = [("accumulate", (row, totals, number)) for number, row in enumerate(tools.cut(rows, 2))]
        step = ("step", {"totals": totals, "is_last": epochs == 1})
        found.append(tools.run_here(of, [*calls, ("gradients", ()), step, *(calls if epochs > 1 else ())]))
    assert found[0][3]["learner/kl"] == pytest.approx(found[1][3]["learner/kl"], rel=1e-5)
    student, teacher = tools.load_plain(untied_policy), tools.load_plain(tied_policy)
    total = 0.0
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64))[None]
        places = slice(len(sample.prompt_ids) - 1, -1)
        own, likely = (
            (lm(input_ids=ids).logits[0, places, : tools.VALID_VOCAB] / tools.TEMPERATURE).log_softmax(-1)
            for lm in (student, teacher)
        )
        values, likeliest = likely.detach().topk(6)
        total = total + likely_kl(own.gather(-1, likeliest), values, kind).sum() / totals.num_tokens
    (0.5 * total).backward()
    wanted = {name: parameter.grad for name, parameter in student.named_parameters()}
    for results in found:
        assert results[3]["learner/kl"] == pytest.approx(total.item(), rel=1e-4)
        assert results[3]["learner/loss"] == pytest.approx(0.5 * total.item(), rel=1e-4)
        assert_tensors_close(results[2], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("top_k", [0, 3])
def test_with_a_reward_both_gradients_add_up(top_k):
    token = torch.arange(TOKENS) % VOCAB
    student, teacher = logits(0).requires_grad_(), logits(1).log_softmax(-1)
    totals = LossTotals(num_sequences=1, num_tokens=TOKENS, length_normalizer=TOKENS)

    def gradient(**settings):
        of_all = student.log_softmax(-1)
        logprobs, (likely, ids) = of_all.gather(-1, token[:, None])[:, 0], teacher.topk(3)
        loss, _ = policy_loss(
            logprobs, logprobs.detach(), torch.ones(TOKENS, dtype=torch.float64), torch.zeros(TOKENS, dtype=torch.long),
            objective=ObjectiveConfig(loss="dapo", kl_coef=0.0, **settings), totals=totals,
            ref_logprobs=teacher.gather(-1, token[:, None])[:, 0], likely=(of_all.gather(-1, ids), likely),
        )  # fmt: skip
        return torch.autograd.grad(loss, student)[0]

    both = gradient(reward_coef=2.0, distill_coef=0.3, distill_top_k=top_k)
    alone = 2.0 * gradient() + 0.3 * gradient(reward_coef=0.0, distill_coef=1.0, distill_top_k=top_k)
    torch.testing.assert_close(both, alone, rtol=0, atol=1e-12)
    assert not torch.allclose(both, 2.0 * gradient(), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], "objective.distill_coef=1 needs a teacher: give reference.path"),
        (["reference.path=x", "objective.loss=gspo"], "objective.loss must be grpo or dr_grpo or dapo or cispo with"),
        (["reference.path=x", "objective.dynamic_sampling=true"], "objective.dynamic_sampling must be false with"),
        (["reference.path=x", "objective.distill_coef=0"], "objective.distill_coef must be > 0 with"),
        (["reference.path=x", "objective.distill_coef=-1"], "objective.distill_coef must be >= 0, got -1"),
        (["reference.path=x", "objective.distill_top_k=-1"], "objective.distill_top_k must be >= 0, got -1"),
        (
            ["reference.path=x", "objective.distill_top_k=0", "objective.distill_kl=forward"],
            "objective.distill_top_k must be > 0 with objective.distill_kl=forward",
        ),
        (["reference.path=x", "objective.distill_kl=jsd"], "objective.distill_kl must be one of"),
    ],
)
def test_what_cannot_distill_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        load_config(["objective=distill", *settings])


def test_it_needs_no_rewards_where_none_is_trained():
    distills = ["objective=distill", "reference.path=x", "reward.functions=[]"]
    assert load_config(distills).reward.functions == []
    with pytest.raises(ConfigError, match="reward.functions is empty"):
        load_config([*distills, "objective.reward_coef=1"])


def test_the_learner_sees_groups_whose_rewards_are_all_equal_and_reads_the_teacher_wherever_it_is():
    for placement in ("workers", "learner"):
        config = load_config(["objective=distill", "reference.path=x", f"reference.placement={placement}"])
        assert config.objective.reference_in_loss and config.objective.needs_reference
        assert config.has_reference_workers == (placement == "workers")


@pytest.mark.parametrize("objective", ["distill", "default", "rloo"])
def test_a_reference_with_another_tokenizer_is_refused_where_one_is_asked(tmp_path, objective):
    save_words(tmp_path / "same", 12)
    save_words(tmp_path / "shorter", 10)
    (tmp_path / "empty").mkdir()
    own = f"model.tokenizer_path={tmp_path / 'same'}"
    asks = [f"objective={objective}", "objective.distill_top_k=9", own]
    configs = {name: load_config([*asks, f"reference.path={tmp_path / name}"]) for name in ("same", "shorter", "empty")}
    tokenizer = load_tokenizer(configs["same"].model)
    check_reference(configs["same"], tokenizer)
    with pytest.raises(ValueError, match=r"shorter must have the tokenizer of .*: 2 tokens are not its .* there none"):
        check_reference(configs["shorter"], tokenizer)
    with pytest.raises(ValueError, match="reference.path"):
        check_reference(configs["empty"], tokenizer)
    check_reference(load_config(["objective=no_kl", own, f"reference.path={tmp_path / 'empty'}"]), tokenizer)


def test_more_likely_ids_than_may_be_drawn_are_refused(tmp_path):
    save_words(tmp_path, 12)
    config = load_config(
        ["objective=distill", f"model.path={tmp_path}", f"reference.path={tmp_path}", "objective.distill_top_k=11"]
    )
    tokenizer = load_tokenizer(config.model)
    check_reference(config, tokenizer)
    config.rollout.bad_token_ids = [3, 4]
    with pytest.raises(ValueError, match=r"objective.distill_top_k must be <= 10, the ids that may be drawn, got 11"):
        check_reference(config, tokenizer)
