"""The control run trains on the same advantages in another order."""

from __future__ import annotations

from types import SimpleNamespace

from benchmarks.control import shuffle_advantages


def shuffled(seed):
    samples = [SimpleNamespace(advantage=float(number)) for number in range(8)]
    shuffle_advantages(SimpleNamespace(trained_samples=lambda: samples), seed)
    return [sample.advantage for sample in samples]


def test_shuffled_advantages_are_a_permutation_of_their_step():
    assert sorted(shuffled("0/3/0")) == [float(number) for number in range(8)] != shuffled("0/3/0")
    assert shuffled("0/3/0") == shuffled("0/3/0") != shuffled("0/4/0")
