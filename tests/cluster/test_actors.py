"""What the wrappers of workers add: progress within a call. The classes without Ray around them."""

from __future__ import annotations

import os
import resource
from types import SimpleNamespace

import numpy as np
import pytest

from infsample_rl.cluster.actors import ColocatedCalls, LearnerCalls
from infsample_rl.cluster.colocated import TurnLock
from infsample_rl.cluster.messages import seal
from infsample_rl.cluster.observed import Observed
from infsample_rl.cluster.reference_actors import ReferenceCalls
from infsample_rl.types import ReferenceReport, ReferenceResult, RowWork
from tests.tiny_models import reference_tokens

ROWS = seal([RowWork(row=None, prompt_ids={}, totals=totals, row_id=None) for totals in (None, "totals", "totals")])


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [(256, 4096, 4096), (1024, 2**20, 65536), (1024, resource.RLIM_INFINITY, 65536), (2**20, 2**20, None)],
)
def test_a_worker_may_hold_a_file_for_every_trajectory(monkeypatch, soft, hard, raised):
    """Not as few as the shell lets a program that it starts, whoever starts the worker."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    set_limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: set_limits.append(limit))
    Observed().begin({})
    assert set_limits == ([] if raised is None else [(resource.RLIMIT_NOFILE, (raised, hard))])


def test_a_learner_ranks_progress_grows_with_every_row_of_a_call():
    calls, seen = LearnerCalls.__new__(LearnerCalls), []
    calls.learner = SimpleNamespace(
        remember=lambda *_: seen.append(calls.progress()), accumulate=lambda *_: seen.append(calls.progress()) or {}
    )
    assert len(calls.learn_rows(ROWS)) == 3 and seen == [0, 1, 2] and calls.progress() == 3


def test_a_process_that_also_samples_counts_rows_and_running_steps():
    calls = ColocatedCalls.__new__(ColocatedCalls)
    calls.learner = SimpleNamespace(remember=lambda *_: None, accumulate=lambda *_: {})
    calls.rollout, calls.turn = SimpleNamespace(progress=lambda: 40), TurnLock()
    calls.learn_rows(ROWS)
    assert calls.progress() == 43


def test_a_reference_workers_progress_grows_with_every_micro_group_of_a_call(fake_ray):
    calls, seen = ReferenceCalls.__new__(ReferenceCalls), []
    calls._others = []

    def logprobs(prompt, completions):
        seen.append(calls.progress())
        return ReferenceResult(
            tokens=[reference_tokens(np.zeros(3, np.float32))],
            report=ReferenceReport(kl_sums=[0.5], peak_memory_bytes=7),
        )

    calls.worker = SimpleNamespace(logprobs=logprobs)
    assert len(calls.logprobs([seal("a prompt")] * 2, ["a micro-group"], ["another"])) == 3
    assert seen == [0, 1] and calls.progress() == 2
