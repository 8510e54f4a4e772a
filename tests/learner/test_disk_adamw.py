"""AdamW with its moments in a file: the numbers of AdamW, the memory of one parameter, nothing left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from infsample_rl.config import LearnerConfig
from infsample_rl.config.loading import load_config
from infsample_rl.controller.checks import prepare
from infsample_rl.learner.optimizer import build_optimizer, load_moments, moments, set_lr
from infsample_rl.learner.unsharded_backend import UnshardedBackend
from infsample_rl.model.disk import IN_MEMORY, file_system
from infsample_rl.model.logprobs import PackedPolicy
from infsample_rl.model.packing import pack_samples

SHAPES = ((300, 64), (64,), (7, 5, 3), (1,))


def twins(folder, **settings):
    """The same parameters under AdamW in memory and on the disk."""
    found = []
    for place in (None, str(folder)):
        generator = torch.Generator().manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        found.append(
            (
                parameters,
                build_optimizer(parameters, LearnerConfig(lr=1e-2, weight_decay=0.1, moments_folder=place, **settings)),
            )
        )
    return found


def train(parameters, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        set_lr(optimizer, 1e-2 / (1 + step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def assert_same(twins):
    (parameters, memory), (others, disk) = twins
    for parameter, other in zip(parameters, others, strict=True):
        assert torch.equal(parameter, other)
        expected, found = moments(memory, parameter), moments(disk, other)
        assert expected.keys() == found.keys() and all(torch.equal(expected[kind], found[kind]) for kind in expected)


def test_ten_steps_are_bitwise_those_of_adamw_in_memory(disk_folder):
    both = twins(disk_folder)
    assert_same(both)
    assert moments(both[1][1], both[1][0][0]) == {}  # before the first step, as in memory
    for parameters, optimizer in both:
        train(parameters, optimizer, range(10))
    assert both[1][0][0].grad is None
    assert moments(both[1][1], both[1][0][0]).keys() == {"exp_avg", "exp_avg_sq"}
    assert_same(both)


def test_moments_travel_between_memory_and_disk(disk_folder):
    (parameters, memory), (others, disk) = twins(disk_folder)
    train(parameters, memory, range(3))
    for parameter, other in zip(parameters, others, strict=True):
        other.data.copy_(parameter)
        load_moments(disk, other, moments(memory, parameter), 3)
    train(parameters, memory, range(3, 6))
    train(others, disk, range(3, 6))
    assert_same(((parameters, memory), (others, disk)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_learner_updates_alike(tools, tied_policy, disk_folder, dtype):
    found = []
    for folder in (None, str(disk_folder)):
        lm = tools.load_plain(tied_policy)
        backend = UnshardedBackend(
            PackedPolicy(lm, valid_vocab=60, chunk_tokens=7), LearnerConfig(lr=1e-3, moments_folder=folder), dtype=dtype
        )
        for _ in range(3):
            backend.backward(
                backend.forward(pack_samples(tools.make_samples(tools.load_plain(tied_policy)), "cpu").row, 0.7)[
                    0
                ].sum()
            )
            backend.update(factor=0.1, max_norm=0.5, lr=1e-3)
        found.append(
            {name: {kind: value.clone() for kind, value in state.items()} for name, state in backend.training_states()}
        )
    for name, state in found[0].items():
        assert state.keys() == found[1][name].keys() == {"master", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(value, found[1][name][kind]) for kind, value in state.items()), name


MEASURE = """
import sys, torch
from infsample_rl.config import LearnerConfig
from infsample_rl.learner.optimizer import build_optimizer
from infsample_rl.model.peak_memory import PeakMemory
parameters = [torch.nn.Parameter(torch.ones(1024, 1024)) for _ in range(24)]
for parameter in parameters:
    parameter.grad = torch.ones_like(parameter)
optimizer = build_optimizer(parameters, LearnerConfig(moments_folder=sys.argv[1] or None))
for _ in range(2):
    memory = PeakMemory(torch.device("cpu"))
    memory.reset()
    before = memory.peak_bytes()
    optimizer.step()
    print(memory.peak_bytes() - before)
"""


def test_a_step_holds_the_moments_of_one_parameter_at_a_time(disk_folder):
    peaks = {}
    for folder in ("", str(disk_folder)):
        done = subprocess.run([sys.executable, "-c", MEASURE, folder], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        peaks[folder] = [int(line) for line in done.stdout.split()]
    one = 2 * 4 * 1024 * 1024
    assert peaks[""][0] > 20 * one  # made in the first step, and kept
    assert max(peaks[str(disk_folder)]) < 3 * one
    assert list(Path(disk_folder).iterdir()) == []  # the file has no name: nothing is left, however a process ends


PLACE = "learner.moments_folder=/tmp"
REFUSED = [
    (
        ["learner.moments_folder=/no/where"],
        "learner.moments_folder must be a folder of its worker's machine, got /no/where, which is none",
    ),
    ([PLACE, "learner.backend=deepspeed"], f"learner.backend must be fsdp with {PLACE}, got deepspeed"),
    ([PLACE, "learner.optimizer=adamw_8bit"], f"learner.optimizer must be adamw with {PLACE}, got adamw_8bit"),
    ([PLACE, "cluster.learner_gpus=1"], f"learner.offload_optimizer must be true with {PLACE}"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_cannot_be_is_refused_before_the_run(tmp_path, overrides, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        prepare(load_config([*overrides, f"run.dir={tmp_path / 'run'}"]))


def test_a_folder_in_memory_is_refused(tmp_path):
    if file_system(Path("/dev/shm")) not in IN_MEMORY:
        pytest.skip("/dev/shm is no tmpfs here")
    with pytest.raises(
        ValueError,
        match=r"^learner.moments_folder must be on a disk, got /dev/shm, which is a tmpfs and lies in memory",
    ):
        prepare(load_config(["learner.moments_folder=/dev/shm", f"run.dir={tmp_path / 'run'}"]))


def test_a_disk_without_room_is_named_before_the_first_step(disk_folder, monkeypatch):
    def full(*arguments):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        ValueError,
        match=r"^learner.moments_folder=.* has no room for .* GB of AdamW's moments: No space left on device$",
    ):
        twins(disk_folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_named(disk_folder):
    disk_folder.chmod(0o500)
    try:
        with pytest.raises(ValueError, match="cannot be written to"):
            twins(disk_folder)
    finally:
        disk_folder.chmod(0o700)
