import importlib.util

import pytest
import torch

from infsample_rl.config import LearnerConfig
from infsample_rl.config.loading import load_config
from infsample_rl.controller.checks import prepare
from infsample_rl.controller.inputs import read_inputs
from infsample_rl.learner.optimizer import build_optimizer, load_moments, lr_at, moments, set_lr


def rates(total, **settings):
    return [lr_at(step, total, LearnerConfig(lr=1.0, **settings)) for step in range(total)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0]),
        ({}, [1.0, 1.0]),
        ({"warmup_steps": 2, "lr_schedule": "linear"}, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ({"lr_schedule": "linear", "min_lr_ratio": 0.2}, [1.0, 0.8, 0.6, 0.4]),
        ({"lr_schedule": "cosine"}, [1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2]),
        ({"warmup_steps": 3, "lr_schedule": "cosine"}, [1 / 3, 2 / 3, 1.0]),  # a run that is all warm-up
    ],
)
def test_rates_written_out(settings, expected):
    assert rates(len(expected), **settings) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_rate_falls_to_its_minimum_after_the_last_step(schedule):
    assert lr_at(9, 4, LearnerConfig(lr=2.0, lr_schedule=schedule, min_lr_ratio=0.1)) == pytest.approx(0.2)


def test_weight_decay_is_on_matrices_only():
    matrix, norm, frozen = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,), (3, 3)))
    frozen.requires_grad_(False)
    optimizer = build_optimizer(
        [matrix, norm, frozen], LearnerConfig(lr=0.1, weight_decay=0.5, beta1=0.8, beta2=0.95, adam_epsilon=1e-6)
    )
    assert [
        (len(group["params"]), group["weight_decay"], group["betas"], group["eps"]) for group in optimizer.param_groups
    ] == [
        (1, 0.5, (0.8, 0.95), 1e-6),
        (1, 0.0, (0.8, 0.95), 1e-6),
    ]
    matrix.grad, norm.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert matrix.tolist() == [[pytest.approx(0.95)] * 2] * 2
    assert norm.tolist() == [1.0, 1.0]


def one_parameter(learner, seed=0):
    """A matrix of whole blocks and a small vector, and an optimizer of both."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((64, 64), (10,))]
    return parameters, build_optimizer(parameters, learner)


def train(parameters, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        set_lr(optimizer, 0.01 / (step + 1))
        optimizer.step()


def test_8_bit_moments_are_saved_as_float32_and_come_back():
    pytest.importorskip("torchao")
    parameters, optimizer = one_parameter(LearnerConfig(optimizer="adamw_8bit"))
    assert moments(optimizer, parameters[0]) == {}
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters:
        given = {
            "exp_avg": torch.randn(parameter.shape, generator=generator),
            "exp_avg_sq": torch.rand(parameter.shape, generator=generator),
        }
        load_moments(optimizer, parameter, given, 4)
        found = moments(optimizer, parameter)
        assert {(type(value), value.dtype) for value in found.values()} == {(torch.Tensor, torch.float32)}
        # below 4,096 values float32; else the steps of 8 bits are up to 1.4 % of a block's largest
        for name, value in found.items():
            assert (
                torch.equal(value, given[name])
                if parameter.numel() < 4096
                else (value - given[name]).abs().max() < 0.02 * given[name].abs().max()
            )
        again, later = one_parameter(LearnerConfig(optimizer="adamw_8bit"))
        twin = again[0] if parameter.numel() >= 4096 else again[1]
        load_moments(later, twin, found, 4)
        for name, value in moments(later, twin).items():  # rounding what is rounded: nearly nothing is lost any more
            assert (value - found[name]).abs().max() < 0.01 * value.abs().max()
    assert optimizer.state[parameters[0]]["exp_avg"].codes.dtype == torch.uint8


@pytest.mark.slow  # torch.compile: 11 s
def test_8_bit_adamw_follows_float32_and_its_next_update_after_a_resume_is_the_same():
    pytest.importorskip("torchao")
    eight, full = (
        LearnerConfig(lr=0.5, weight_decay=0.1, optimizer="adamw_8bit"),
        LearnerConfig(lr=0.5, weight_decay=0.1),
    )
    start, _ = one_parameter(full)
    (ours, optimizer), (plain, other) = one_parameter(eight), one_parameter(full)
    train(ours, optimizer, range(4))
    train(plain, other, range(4))
    for own, expected, before in zip(ours, plain, start, strict=True):
        assert (own - expected).abs().mean() < 0.02 * (expected - before).abs().mean()  # 0.4 % when measured
    torch.testing.assert_close(ours[1], plain[1], rtol=1e-6, atol=1e-6)  # below 4,096 values moments stay float32
    resumed, later = one_parameter(eight)
    for parameter, old in zip(resumed, ours, strict=True):
        parameter.data.copy_(old.data)
        load_moments(later, parameter, {name: value.clone() for name, value in moments(optimizer, old).items()}, 4)
    before = [parameter.detach().clone() for parameter in ours]
    train(ours, optimizer, [4])
    train(resumed, later, [4])
    for own, again, old in zip(ours, resumed, before, strict=True):
        assert (again - own).abs().max() <= 0.02 * (own - old).abs().max()  # 0.5 % when measured
    assert torch.equal(ours[1], resumed[1])


def test_8_bits_without_torchao_is_one_line_before_anything_starts(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else find(name))
    with pytest.raises(
        ValueError, match="^learner.optimizer=adamw_8bit needs the package torchao; install it or take adamw$"
    ):
        one_parameter(LearnerConfig(optimizer="adamw_8bit"))
    config = load_config(["learner.optimizer=adamw_8bit", f"run.dir={tmp_path / 'run'}"])
    with pytest.raises(ValueError, match="^learner.optimizer=adamw_8bit needs the package torchao"):
        prepare(config, read_inputs(config))
