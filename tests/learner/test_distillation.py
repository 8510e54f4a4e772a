"""On-policy distillation: the gradient is, in the mean over what may be sampled, that of the exact reverse KL."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from infsample_rl.config import ObjectiveConfig
from infsample_rl.config.loading import ConfigError, load_config
from infsample_rl.learner.loss import policy_loss
from infsample_rl.model.tokenizer import check_teacher, load_tokenizer
from infsample_rl.types import LossTotals
from tests.tiny_models import save_words

TOKENS, VOCAB = 5, 7


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
    objective = ObjectiveConfig(loss=loss, kl="none", reward_coef=0.0, distill_coef=0.5)
    torch.testing.assert_close(mean_gradient(objective, advantage=3.0), 0.5 * wanted, rtol=0, atol=1e-12)


def test_the_reverse_kl_is_trls_loss_at_beta_1():
    trainer = pytest.importorskip("trl.experimental.gkd").GKDTrainer
    peer = trainer.generalized_jsd_loss(
        logits(0)[None], logits(1)[None], labels=torch.zeros(1, TOKENS, dtype=torch.long), beta=1
    )
    assert peer.item() == pytest.approx(reverse_kl(logits(0), logits(1)).item(), rel=1e-12)


def test_with_a_reward_both_gradients_add_up():
    token = torch.arange(TOKENS) % VOCAB
    student, teacher = logits(0).requires_grad_(), logits(1).log_softmax(-1)
    totals = LossTotals(num_sequences=1, num_tokens=TOKENS, length_normalizer=TOKENS)

    def gradient(**settings):
        logprobs = student.log_softmax(-1).gather(-1, token[:, None])[:, 0]
        loss, _ = policy_loss(
            logprobs, logprobs.detach(), torch.ones(TOKENS, dtype=torch.float64), torch.zeros(TOKENS, dtype=torch.long),
            objective=ObjectiveConfig(loss="dapo", kl="none", **settings), totals=totals,
            ref_logprobs=teacher.gather(-1, token[:, None])[:, 0],
        )  # fmt: skip
        return torch.autograd.grad(loss, student)[0]

    both = gradient(reward_coef=2.0, distill_coef=0.3)
    alone = 2.0 * gradient() + 0.3 * gradient(reward_coef=0.0, distill_coef=1.0)
    torch.testing.assert_close(both, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], "objective.distill_coef=1 needs a teacher: give reference.path"),
        (["reference.path=x", "objective.loss=gspo"], "objective.loss must be grpo or dr_grpo or dapo or cispo with"),
        (["reference.path=x", "objective.dynamic_sampling=true"], "objective.dynamic_sampling must be false with"),
        (["reference.path=x", "objective.distill_coef=0"], "objective.distill_coef must be > 0 with"),
        (["reference.path=x", "objective.distill_coef=-1"], "objective.distill_coef must be >= 0, got -1"),
    ],
)
def test_what_cannot_distill_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        load_config(["objective=distill", *settings])


def test_the_learner_sees_groups_whose_rewards_are_all_equal_and_reads_the_teacher_wherever_it_is():
    for placement in ("workers", "learner"):
        config = load_config(["objective=distill", "reference.path=x", f"reference.placement={placement}"])
        assert config.objective.reference_in_loss and config.objective.needs_reference
        assert config.has_reference_workers == (placement == "workers")


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path):
    save_words(tmp_path / "same", 12)
    save_words(tmp_path / "shorter", 10)
    (tmp_path / "empty").mkdir()
    own = f"model.tokenizer_path={tmp_path / 'same'}"
    configs = {
        name: load_config(["objective=distill", own, f"reference.path={tmp_path / name}"])
        for name in ("same", "shorter", "empty")
    }
    tokenizer = load_tokenizer(configs["same"].model)
    check_teacher(configs["same"], tokenizer)
    with pytest.raises(ValueError, match=r"shorter must have the tokenizer of .*: 2 tokens are not its .* there none"):
        check_teacher(configs["shorter"], tokenizer)
    with pytest.raises(ValueError, match="reference.path"):
        check_teacher(configs["empty"], tokenizer)
