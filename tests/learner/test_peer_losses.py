"""Our losses and gradients beside those of verl 0.9.1 and TRL 1.16.0, in float64.

`.venv-peers/bin/python tests/learner/test_peer_losses.py` writes what the peers give on one batch to
tests/data/learner/golden_losses.jsonl, which test_golden_losses.py compares with where they are absent.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from infsample_rl.config import ObjectiveConfig
from infsample_rl.learner.advantage import group_advantages, overlong_penalty
from infsample_rl.learner.divergence import kl_estimate
from infsample_rl.learner.loss import effective_sample_size, policy_loss
from infsample_rl.types import LossTotals

pytestmark = pytest.mark.peers
GOLDEN = Path(__file__).parent.parent / "data" / "learner" / "golden_losses.jsonl"
NORMALIZER = 16  # dr_grpo's constant
NO_DUAL_CLIP = 1e9  # verl bounds the loss of a negative advantage at ratio 3, which neither the papers nor TRL do
LOSSES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")
ONE_PROCESS = SimpleNamespace(
    gather=lambda value: value, reduce=lambda value, reduction: value, num_processes=1, sync_gradients=True
)


@dataclass
class Batch:
    """N responses with T tokens in all; token tensors are [T] float64."""

    lengths: Tensor  # [N]
    new: Tensor
    old: Tensor
    reference: Tensor
    engine: Tensor
    entropy: Tensor
    advantages: Tensor  # [N]

    @property
    def ids(self) -> Tensor:
        return torch.arange(len(self.lengths)).repeat_interleave(self.lengths)

    @property
    def mask(self) -> Tensor:
        return torch.arange(int(self.lengths.max())) < self.lengths[:, None]

    def padded(self, flat: Tensor) -> Tensor:
        """[T] -> [N, longest]; padding is a large number, which no loss may read."""
        rows = torch.full(self.mask.shape, 3.0, dtype=torch.float64)
        return rows.masked_scatter(self.mask, flat)


def make_batch(seed: int, *, spread: float) -> Batch:
    """A random batch; log-ratios are inside +-spread and a quarter of them anywhere in it."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.cat([torch.tensor([1]), torch.randint(1, 9, (7,), generator=generator)])
    count = int(lengths.sum())

    def away(near: float) -> Tensor:
        close = torch.randn(count, generator=generator, dtype=torch.float64).clamp(-3, 3) * near
        far = (torch.rand(count, generator=generator, dtype=torch.float64) * 2 - 1) * spread
        return torch.where(torch.rand(count, generator=generator) < 0.25, far, close)

    old = -torch.rand(count, generator=generator, dtype=torch.float64) * 6
    new = (old + away(0.2)).clamp(max=-1e-3)
    return Batch(
        lengths=lengths,
        new=new,
        old=old,
        reference=new + away(0.2),
        engine=old + away(0.05) / 4,
        entropy=torch.rand(count, generator=generator, dtype=torch.float64) * 3,
        advantages=torch.randn(8, generator=generator, dtype=torch.float64),
    )


def our_loss(objective: ObjectiveConfig, batch: Batch, new: Tensor, entropy: Tensor) -> Tensor:
    totals = LossTotals(num_sequences=len(batch.lengths), num_tokens=len(batch.old), length_normalizer=NORMALIZER)
    tensors = {"ref_logprobs": batch.reference, "engine_logprobs": batch.engine, "entropy": entropy}
    return policy_loss(
        new, batch.old, batch.advantages[batch.ids], batch.ids, objective=objective, totals=totals, **tensors
    )[0]


def verl_loss(
    objective: ObjectiveConfig, batch: Batch, new: Tensor, entropy: Tensor, totals: LossTotals | None = None
) -> Tensor:
    """verl's workers/utils/losses.py:ppo_loss from its parts; `totals` of a batch this one is a part of."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    policy, aggregation = {
        "grpo": ("vanilla", "seq-mean-token-mean"),
        "dr_grpo": ("vanilla", "seq-mean-token-sum-norm"),
        "dapo": ("vanilla", "token-mean"),
        "gspo": ("gspo", "seq-mean-token-mean"),
        "cispo": ("cispo", "token-mean"),
    }[objective.loss]
    low = 1.0 if objective.loss == "cispo" else objective.clip_low  # from 0 on: the one-sided form
    settings = {"clip_ratio_low": low, "clip_ratio_high": objective.clip_high, "clip_ratio_c": NO_DUAL_CLIP}
    config = ActorConfig(
        strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=aggregation, **settings
    )
    config.global_batch_info["loss_scale_factor"] = NORMALIZER
    if totals is not None:
        config.global_batch_info.update(batch_num_tokens=totals.num_tokens, global_batch_size=totals.num_sequences)
    mask, weights = batch.mask, None
    if objective.importance != "none":
        level = objective.importance.removesuffix("_tis")
        weights = verl_weights(batch, level, objective.importance_cap)[0]
    advantages = batch.advantages[:, None].expand(mask.shape)
    loss, _ = core_algos.get_policy_loss_fn(policy)(
        batch.padded(batch.old), batch.padded(new), advantages, mask, aggregation, config, weights
    )
    if objective.kl_in_loss:
        kl = core_algos.kl_penalty(batch.padded(new), batch.padded(batch.reference), objective.kl)
        loss = loss + objective.kl_coef * core_algos.agg_loss(kl, mask, aggregation, **config.global_batch_info)
    if objective.entropy_coef:
        loss = loss - objective.entropy_coef * core_algos.agg_loss(
            batch.padded(entropy), mask, aggregation, **config.global_batch_info
        )
    return loss


def verl_weights(batch: Batch, level: str, cap: float) -> tuple[Tensor, dict[str, float]]:
    from verl.trainer.ppo import rollout_corr_helper

    log_ratio = batch.padded(batch.old - batch.engine)
    return rollout_corr_helper.compute_rollout_correction_weights(
        log_ratio, batch.mask, rollout_is=level, rollout_is_threshold=cap
    )


def trl_loss(
    objective: ObjectiveConfig, batch: Batch, new: Tensor, entropy: Tensor, loss_type: str | None = None
) -> Tensor:
    """TRL's GRPOTrainer._compute_loss on a stand-in for the trainer: one process, one micro-batch."""
    from trl import GRPOTrainer

    level = "sequence" if objective.loss == "gspo" else "token"
    loss_type = loss_type or ("grpo" if objective.loss == "gspo" else objective.loss)
    trainer = SimpleNamespace(
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=objective.kl_coef if objective.kl_in_loss else 0.0,
        loss_type=loss_type,
        epsilon_low=objective.clip_low,
        epsilon_high=1 + objective.clip_high if objective.loss == "cispo" else objective.clip_high,
        use_vllm=objective.importance != "none",
        vllm_importance_sampling_correction=True,
        max_completion_length=NORMALIZER,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=objective.entropy_coef > 0,
        use_adaptive_entropy=False,
        entropy_coef=objective.entropy_coef,
        args=SimpleNamespace(steps_per_generation=1, delta=None, use_bias_correction_kl=False),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        accelerator=ONE_PROCESS,
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.padded(new), batch.padded(entropy), None),
    )
    one, mask = torch.ones(len(batch.lengths), 1, dtype=torch.long), batch.mask.long()
    # the next three lines: TRL's _generate_and_score_completions
    weights = batch.padded(batch.old - batch.engine) * mask
    if objective.importance == "sequence_tis":
        weights = weights.sum(-1, keepdim=True)
    inputs = {
        "prompt_ids": one,
        "prompt_mask": one,
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.padded(batch.old),
        "ref_per_token_logps": batch.padded(batch.reference),
        "importance_sampling_ratio": weights.exp().clamp(max=objective.importance_cap),
        "num_items_in_batch": mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def loss_and_gradients(loss_of, objective: ObjectiveConfig, batch: Batch) -> tuple[float, list[float], list[float]]:
    """The loss, its gradient by log-probabilities and by entropies."""
    new, entropy = batch.new.clone().requires_grad_(), batch.entropy.clone().requires_grad_()
    loss = loss_of(objective, batch, new, entropy)
    loss.backward()
    return loss.item(), new.grad.tolist(), [0.0] * len(entropy) if entropy.grad is None else entropy.grad.tolist()


def assert_same(objective: ObjectiveConfig, batch: Batch, peer) -> None:
    ours, theirs = (loss_and_gradients(loss, objective, batch) for loss in (our_loss, peer))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-9, abs=1e-9)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-9, abs=1e-9)
    assert ours[2] == pytest.approx(theirs[2], rel=1e-9, abs=1e-9)


def settings(loss: str, **others) -> dict:
    return {
        "loss": loss,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "kl_coef": 0.0,
        "importance": "none",
        "importance_cap": 1.5,
    } | others


VERL_CASES = [
    *[settings(loss) for loss in LOSSES],
    *[settings(loss, kl=kl, kl_coef=0.3) for loss in LOSSES for kl in ("k1", "k2", "k3")],
    *[
        settings(loss, importance=kind)
        for loss in LOSSES
        for kind in ("token_tis", "sequence_tis")
        if (loss, kind) != ("gspo", "token_tis")
    ],
    *[settings(loss, entropy_coef=0.2) for loss in LOSSES],
    settings("dapo", kl="k3", kl_coef=0.3, importance="token_tis", entropy_coef=0.2),
]
TRL_CASES = [
    *[settings(loss) for loss in LOSSES],
    *[settings(loss, kl="k3", kl_coef=0.3) for loss in LOSSES],
    *[settings(loss, importance=kind) for loss in LOSSES for kind in ("token_tis", "sequence_tis")],
    *[settings(loss, entropy_coef=0.2) for loss in ("dapo", "cispo")],  # TRL's bonus is a token mean whatever the loss
    settings("grpo", kl="k3", kl_coef=0.3, importance="sequence_tis"),
]


def name_of(case: dict) -> str:
    return " ".join(
        f"{key}={value}"
        for key, value in case.items()
        if key == "loss" or value != settings("")[key if key in settings("") else "loss"]
    )


@pytest.mark.parametrize("case", VERL_CASES, ids=name_of)
def test_equal_to_verl(case):
    for seed in range(5):
        # verl caps k3 at 10, which d = -2.5 stays below.
        assert_same(ObjectiveConfig(**case), make_batch(seed, spread=2.5 if case.get("kl") == "k3" else 4.9), verl_loss)


@pytest.mark.parametrize("case", TRL_CASES, ids=name_of)
def test_equal_to_trl(case):
    for seed in range(5):
        assert_same(ObjectiveConfig(**case), make_batch(seed, spread=4.9), trl_loss)


@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_with_global_counts_add_up_as_in_verl(loss):
    objective, batch = (
        ObjectiveConfig(**settings(loss, kl="k2", kl_coef=0.3, entropy_coef=0.2)),
        make_batch(3, spread=4.9),
    )
    totals = LossTotals(num_sequences=8, num_tokens=len(batch.old), length_normalizer=NORMALIZER)

    def in_parts(objective, batch, new, entropy):
        total = torch.zeros((), dtype=torch.float64)
        for part in (slice(0, 1), slice(1, 5), slice(5, 8)):
            tokens = torch.isin(batch.ids, torch.arange(8)[part])
            cut = {
                field.name: getattr(batch, field.name)[part if field.name in ("lengths", "advantages") else tokens]
                for field in fields(Batch)
            }
            total = total + verl_loss(objective, Batch(**cut), new[tokens], entropy[tokens], totals)
        return total

    assert_same(objective, batch, in_parts)


@pytest.mark.parametrize("kind", ["token_tis", "sequence_tis"])
def test_effective_sample_size_equals_verls(kind):
    batch = make_batch(2, spread=4.9)
    objective = ObjectiveConfig(**settings("dapo", importance=kind))
    totals = LossTotals(num_sequences=8, num_tokens=len(batch.old), length_normalizer=NORMALIZER)
    _, metrics = policy_loss(
        batch.new,
        batch.old,
        batch.advantages[batch.ids],
        batch.ids,
        objective=objective,
        totals=totals,
        engine_logprobs=batch.engine,
    )
    ours = effective_sample_size(
        metrics["engine_weight"] * totals.num_tokens,
        metrics["engine_weight_square"] * totals.num_tokens,
        len(batch.old),
    )
    theirs = verl_weights(batch, kind.removesuffix("_tis"), objective.importance_cap)[1]["rollout_is_eff_sample_size"]
    assert 0.2 < ours < 0.99 and ours == pytest.approx(theirs, rel=1e-6)  # verl adds 1e-8 to the mean


@pytest.mark.parametrize("kind", ["std", "mean_only", "rloo"])
def test_advantages_equal_verls(kind):
    from verl.trainer.ppo import core_algos

    generator = np.random.default_rng(0)
    for group in ([1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], generator.normal(size=32).tolist(), [0.5, 0.5]):
        rewards, mask = (
            torch.tensor(group, dtype=torch.float64)[:, None],
            torch.ones(len(group), 1, dtype=torch.float64),
        )
        index = np.zeros(len(group), dtype=int)
        if kind == "rloo":
            theirs = core_algos.compute_rloo_outcome_advantage(rewards, mask, index)[0]
        else:
            theirs = core_algos.compute_grpo_outcome_advantage(
                rewards, mask, index, norm_adv_by_std_in_grpo=kind == "std"
            )[0]
        assert group_advantages(group, kind) == pytest.approx(theirs[:, 0].tolist(), rel=1e-9, abs=1e-9)


# Where a peer differs from us, as docs/objectives.md says.


def test_verls_gspo_with_token_weights_has_our_loss_and_another_gradient():
    objective, batch = ObjectiveConfig(**settings("gspo", importance="token_tis")), make_batch(0, spread=4.9)
    ours, theirs = (loss_and_gradients(loss, objective, batch) for loss in (our_loss, verl_loss))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-9)
    assert ours[1] != pytest.approx(theirs[1], abs=1e-4)


def test_trls_entropy_bonus_is_a_token_mean_in_grpo_too():
    objective, batch = ObjectiveConfig(**settings("grpo", entropy_coef=0.2)), make_batch(0, spread=4.9)
    assert loss_and_gradients(trl_loss, objective, batch)[2] == pytest.approx([-0.2 / len(batch.old)] * len(batch.old))
    assert loss_and_gradients(our_loss, objective, batch)[2] == pytest.approx(
        (-0.2 / 8 / batch.lengths[batch.ids]).tolist()
    )


def test_verl_caps_k3_at_ten_and_trl_and_we_do_not():
    from verl.trainer.ppo import core_algos

    new, reference = torch.tensor([-6.0], dtype=torch.float64), torch.tensor([-2.0], dtype=torch.float64)
    assert core_algos.kl_penalty(new, reference, "k3").item() == 10.0
    assert kl_estimate(new, reference, "k3").item() == pytest.approx(np.exp(4) - 5)


def test_verls_overlong_shaping_is_ours():
    from verl import DataProto
    from verl.workers.reward_manager.dapo import DAPORewardManager

    class Tokenizer:
        eos_token = "</s>"

        def decode(self, ids, skip_special_tokens):
            return "text"

    shaping = SimpleNamespace(enable=True, len=20, penalty_factor=0.5, log=False)
    manager = DAPORewardManager(Tokenizer(), 0, lambda **_: 1.0, max_resp_len=100, overlong_buffer_cfg=shaping)
    lengths = [1, 80, 81, 95, 100]
    mask = (torch.arange(101) < torch.tensor(lengths)[:, None] + 1).long()  # one prompt token
    tensors = {"prompts": torch.ones(5, 1).long(), "responses": torch.ones(5, 100).long(), "attention_mask": mask}
    rows = {"reward_model": np.array([{"ground_truth": ""}] * 5), "data_source": np.array(["x"] * 5)}
    rewards = manager(DataProto.from_single_dict(tensors | rows)).sum(-1).tolist()
    assert rewards == pytest.approx([1.0 + overlong_penalty(length, 100, 20, 0.5) for length in lengths])


def write_golden() -> None:
    """Write one batch and what each peer makes of it; no number in the file is ours."""
    batch = make_batch(92, spread=2.5)
    cases = [(f"verl {version('verl')}", verl_loss, case) for case in VERL_CASES]
    cases += [(f"trl {version('trl')}", trl_loss, case) for case in TRL_CASES]
    results = []
    for peer, loss_of, case in cases:
        loss, by_logprob, by_entropy = loss_and_gradients(loss_of, ObjectiveConfig(**case), batch)
        results.append(
            {"peer": peer, "objective": case, "loss": loss, "gradient": by_logprob, "entropy_gradient": by_entropy}
        )
        if "entropy_coef" not in case:
            del results[-1]["entropy_gradient"]
    inputs = {field.name: getattr(batch, field.name).tolist() for field in fields(Batch)}
    lines = [{"batch": inputs | {"length_normalizer": NORMALIZER}}, *results]
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    GOLDEN.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    write_golden()
