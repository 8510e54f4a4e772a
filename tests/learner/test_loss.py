import math

import pytest
import torch

from infsample_rl.config import ObjectiveConfig
from infsample_rl.learner.loss import effective_sample_size, engine_mismatch, policy_loss
from infsample_rl.types import LossTotals

# Two sequences: A (2 tokens, advantage 1) with ratios 1.5 and 0.5, B (1 token, advantage -2) with ratio 0.5.
OLD = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
NEW = OLD + torch.tensor([1.5, 0.5, 0.5], dtype=torch.float64).log()
ADVANTAGES = torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64)
IDS = torch.tensor([7, 7, 3])
TOTALS = LossTotals(num_sequences=2, num_tokens=3, length_normalizer=10)


def loss_of(loss="grpo", new=NEW, totals=TOTALS, **settings):
    tensors = {name: settings.pop(name) for name in ("ref_logprobs", "engine_logprobs", "entropy") if name in settings}
    objective = ObjectiveConfig(**{"loss": loss, "kl_coef": 0.0, **settings})
    return policy_loss(new, OLD, ADVANTAGES, IDS, objective=objective, totals=totals, **tensors)


# Clipped at 0.8 and 1.2: token objectives min(1.5, 1.2) = 1.2, min(0.5, 0.8) = 0.5, min(-1.0, -1.6) = -1.6.
@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("grpo", -((1.2 + 0.5) / 2 - 1.6) / 2),
        ("dr_grpo", -(1.2 + 0.5 - 1.6) / (2 * 10)),
        ("dapo", -(1.2 + 0.5 - 1.6) / 3),
        # sequence ratios sqrt(1.5 * 0.5) = 0.8660 (inside the clip) and 0.5 (clipped to 0.8)
        ("gspo", -(math.sqrt(0.75) - 1.6) / 2),
        # min(ratio, 1.2) * advantage * logprob, no lower bound
        ("cispo", -(1.2 * (-1 + math.log(1.5)) + 0.5 * (-2 + math.log(0.5)) - 2 * 0.5 * (-3 + math.log(0.5))) / 3),
    ],
)
@pytest.mark.parametrize("reward_coef", [1.0, 0.5])
def test_losses_written_out(loss, expected, reward_coef):
    value, metrics = loss_of(loss, reward_coef=reward_coef)
    assert value.item() == pytest.approx(reward_coef * expected, rel=1e-12)
    assert metrics["clip_fraction"] == pytest.approx({"gspo": 1 / 3, "cispo": 1 / 3}.get(loss, 2 / 3))


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_a_ratio_beyond_all_numbers_has_no_gradient_where_the_clip_bounds_it(loss, advantage):
    old = torch.tensor([-95.0, -1.0])
    new = torch.tensor([0.0, -1.0], requires_grad=True)
    objective = ObjectiveConfig(loss=loss, kl_coef=0.0)
    ids, totals = torch.tensor([0, 1]), LossTotals(num_sequences=2, num_tokens=2, length_normalizer=1)
    value, metrics = policy_loss(new, old, torch.tensor([advantage, 1.0]), ids, objective=objective, totals=totals)
    value.backward()
    assert math.isfinite(value.item()) and metrics["clip_fraction"] == (0.5 if advantage or loss == "cispo" else 0.0)
    bounded = -(1 + objective.clip_high) * advantage / 2 if loss == "cispo" else 0.0
    assert new.grad.tolist() == pytest.approx([bounded, -0.5])


def test_kl_is_averaged_like_the_loss_and_weighted_by_its_coefficient():
    reference = NEW - torch.tensor([0.1, 0.2, 0.4], dtype=torch.float64)
    plain, _ = loss_of("grpo")
    value, metrics = loss_of("grpo", kl="k1", kl_coef=0.5, ref_logprobs=reference)
    assert (value - plain).item() == pytest.approx(0.5 * ((0.1 + 0.2) / 2 + 0.4) / 2)
    assert metrics["kl"] == pytest.approx((0.1 + 0.2 + 0.4) / 3)


def test_empty_totals_are_refused():
    with pytest.raises(ValueError, match="totals above zero"):
        loss_of("grpo", totals=LossTotals(num_sequences=0, num_tokens=0, length_normalizer=10))


def test_engine_mismatch_written_out():
    absolute, largest, k3 = engine_mismatch(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.75]))
    assert (absolute.item(), largest.item()) == (0.75, 0.5)
    assert k3.item() == pytest.approx(math.exp(0.5) - 0.5 - 1 + math.exp(-0.25) + 0.25 - 1)


@pytest.mark.parametrize("given", [{}, {"entropy": torch.ones(3, dtype=torch.float64)}])
def test_an_entropy_bonus_without_gradient_is_refused(given):
    with pytest.raises(ValueError, match="entropy_coef=0.1 needs entropies with gradient"):
        loss_of(new=NEW.clone().requires_grad_(), entropy_coef=0.1, **given)


def test_importance_auto_counts_as_none():
    engine = OLD - torch.tensor([4.0, 0.5, 1.5], dtype=torch.float64).log()
    (plain, _), (value, metrics) = loss_of("dapo"), loss_of("dapo", importance="auto", engine_logprobs=engine)
    assert value == plain and metrics["importance_mean"] == 1.0


@pytest.mark.parametrize(
    ("kind", "weights"), [("none", [2.0, 0.5, 1.5]), ("token_tis", [2.0, 0.5, 1.5]), ("sequence_tis", [2.0, 2.0, 1.5])]
)
def test_truncated_weights_and_their_effective_sample_size_written_out(kind, weights):
    engine = OLD - torch.tensor([4.0, 0.5, 1.5], dtype=torch.float64).log()  # old / engine is 4, 0.5 and 1.5
    value, metrics = loss_of("dapo", importance=kind, engine_logprobs=engine)
    used = [1.0] * 3 if kind == "none" else weights
    assert value.item() == pytest.approx(-(1.2 * used[0] + 0.5 * used[1] - 1.6 * used[2]) / 3)
    assert metrics["importance_mean"] == pytest.approx(sum(used) / 3)
    assert metrics["engine_weight"] == pytest.approx(sum(weights) / 3)
    assert metrics["engine_weight_square"] == pytest.approx(sum(weight**2 for weight in weights) / 3)
    size = effective_sample_size(3 * metrics["engine_weight"], 3 * metrics["engine_weight_square"], 3)
    assert size == pytest.approx(sum(weights) ** 2 / (3 * sum(weight**2 for weight in weights)))
    assert effective_sample_size(5.0, 5.0, 5) == 1.0 and effective_sample_size(0.0, 0.0, 0) == 0.0
    if kind != "none":
        with pytest.raises(ValueError, match="needs engine_logprobs"):
            loss_of("dapo", importance=kind)
