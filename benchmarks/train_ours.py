"""Our side of benchmarks.train: GRPO steps in one process, without Ray; engine and learner share the weights.

It is the process that `process.measure` starts; its spec is train_workload.run_spec with our settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from benchmarks import models
from benchmarks.matrix_products import MatrixProducts, matrix_flops
from benchmarks.workload import ModelOptions
from infsample_rl.cluster.colocated import ColocatedWorker
from infsample_rl.config import (
    ClusterConfig,
    Config,
    DataConfig,
    LearnerConfig,
    ModelConfig,
    ObjectiveConfig,
    RewardConfig,
    RewardFunctionConfig,
    RolloutConfig,
    RunConfig,
)
from infsample_rl.data.prompts import build_train_prompts
from infsample_rl.learner.advantage import group_advantages
from infsample_rl.learner.row_plan import RowPlanner, assemble
from infsample_rl.model.peak_memory import PeakMemory
from infsample_rl.types import Completion, LossTotals, RolloutWork, SampleSpec

Spec = dict[str, Any]


class Phases:
    """Seconds of a step by phase; `other` is what is left of the whole."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = dict.fromkeys(("generate", "reward", "learn", "optimizer"), 0.0)
        self.started = self.now()

    def timed(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call and add its seconds to the phase."""
        started = self.now()
        found = function(*arguments)
        self.seconds[name] += self.now() - started
        return found

    def now(self) -> float:
        """Seconds on a clock; what was started on the GPU has ended."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def record(self) -> dict[str, Any]:
        """Seconds of the whole step and of its phases."""
        seconds = self.now() - self.started
        return {"seconds": seconds, "phases": self.seconds | {"other": seconds - sum(self.seconds.values())}}


class OneProcess:
    """An engine and a learner that take turns. The reward is a number made of a response's tokens, so that no group is
    without a signal."""

    def __init__(self, spec: Spec, config: Config) -> None:
        self.config = config
        self.prompts = [np.asarray(ids, np.int32) for ids in spec["prompts"]]
        self.watching: AbstractContextManager[Any] = nullcontext()  # the learner's passes
        self.worker = ColocatedWorker(config, 0, 1, spec["steps"])
        self.worker.setup(None)
        if spec["ignore_eos"]:
            self.worker.rollout.engine.stop_token_ids = set()

    def step(self, number: int) -> dict[str, Any]:
        """Sample, score, learn from every group as it completes, update."""
        clock, group_size = Phases(self.worker.learner.device), self.config.rollout.group_size
        count = self.config.data.prompts_per_step
        prompts = dict(enumerate(self.prompts[number * count : (number + 1) * count]))
        prompt_lengths = {index: len(ids) for index, ids in prompts.items()}
        planner = RowPlanner(
            self.config.learner.max_tokens_per_micro_batch, prompt_lengths, long_rows=self.config.long_rows
        )
        work = [
            RolloutWork(prompt_index=index, prompt_ids=ids, sample_indices=list(range(group_size)))
            for index, ids in prompts.items()
        ]
        stream = self.worker.rollout.stream(work, step=number)
        groups: dict[int, list[Completion]] = {index: [] for index in prompts}
        rewards: list[float] = []
        row_tokens = 0
        while clock.timed("generate", next, stream, None) is not None:
            micro_group = next(stream)
            group = groups[micro_group[0].prompt_index]
            group += micro_group
            if len(group) == group_size:
                scored = clock.timed("reward", reward_of, [completion.token_ids for completion in group])
                row_tokens += self._learn(planner.add_group(self._specs(group, scored)), groups, prompts, clock)
                rewards += scored
        row_tokens += self._learn(planner.flush(), groups, prompts, clock)
        lengths = [len(completion.token_ids) for group in groups.values() for completion in group]
        metrics = clock.timed("optimizer", self._update, self._totals(sum(lengths)), number + 1)
        found = {
            "rewards": rewards,
            "lengths": lengths,
            "learner_tokens": row_tokens,
            "mismatch": metrics["learner/logprob_diff_max"],
        }
        return clock.record() | found

    def _specs(self, group: list[Completion], rewards: list[float]) -> list[SampleSpec]:
        """What the learner must see: nothing of a group whose rewards are all equal, as in our runs, since its gradient
        is zero."""
        advantages = group_advantages(rewards, self.config.objective.advantage)
        if not any(advantages):
            return []
        return [
            SampleSpec(
                prompt_index=completion.prompt_index,
                sample_index=completion.sample_index,
                length=len(completion.token_ids),
                advantages=(advantage,),
            )
            for completion, advantage in zip(group, advantages, strict=True)
        ]

    def _learn(
        self,
        rows: list[list[SampleSpec]],
        groups: dict[int, list[Completion]],
        prompts: dict[int, np.ndarray],
        clock: Phases,
    ) -> int:
        """Tokens of the rows, prompts included."""
        provisional = self._totals(self.config.samples_per_step * self.config.rollout.max_new_tokens)
        tokens = 0
        for row in rows:
            samples = assemble(row, prompts, list(groups.values()), [])
            with self.watching:
                learned = clock.timed("learn", self.worker.learner.accumulate, samples, provisional)
            tokens += learned["row_tokens"]
        return tokens

    def _totals(self, num_tokens: int) -> LossTotals:
        return LossTotals(
            num_sequences=self.config.samples_per_step,
            num_tokens=num_tokens,
            length_normalizer=self.config.rollout.max_new_tokens,
        )

    def _update(self, totals: LossTotals, version: int) -> dict[str, float]:
        metrics = self.worker.learner.step(totals)
        self.worker.publish(version)
        return metrics


def reward_of(responses: list[np.ndarray]) -> list[float]:
    """A number made of each response's tokens, in which any two differ; train_trl.py has the same."""
    return [int(ids.sum()) % 1000 / 1000 for ids in responses]


def main(spec: Spec) -> dict[str, Any]:
    """Every step of the run with its seconds, phases, rewards and lengths, and the most memory it held."""
    device = torch.device("cuda" if spec["device"] != "cpu" and torch.cuda.is_available() else "cpu")
    memory = PeakMemory(device)
    run = OneProcess(spec, config_of(spec, on_cuda=device.type == "cuda"))
    memory.reset()  # the peak of loading does not count
    steps, products = [], MatrixProducts()
    for number in range(spec["steps"]):
        # The step that warms up is watched: all others are timed.
        run.watching = products if number == 0 and device.type == "cpu" else nullcontext()
        steps.append(run.step(number))
        print(f"step {number + 1} of {spec['steps']}: {steps[-1]['seconds']:.1f} s", flush=True)
    found = models.machine(device) | {"steps": steps, "peak_memory_bytes": memory.peak_bytes()}
    if products.counts:
        of_token = products.seconds_alone() / steps[0]["learner_tokens"]
        for step in steps[1:]:
            step["products_seconds"] = of_token * step["learner_tokens"]
    return found


def config_of(spec: Spec, *, on_cuda: bool) -> Config:
    """The settings of the run: GRPO with std advantages, one update a step, no KL."""
    gpus = 1.0 if on_cuda else 0.0
    return Config(
        run=RunConfig(seed=spec["seed"]),
        model=ModelConfig(path=spec["model"], dtype=spec["dtype"]),
        data=DataConfig(
            source="bench", prompts_per_step=spec["prompts_per_step"], max_prompt_tokens=max(map(len, spec["prompts"]))
        ),
        rollout=RolloutConfig(
            group_size=spec["group_size"],
            slots=min(spec["slots"], spec["group_size"] * spec["prompts_per_step"]),
            max_new_tokens=spec["max_new_tokens"],
            predictor="none",
            **{"temperature": spec["temperature"], "top_p": 1.0, "top_k": 0, "min_p": 0.0},
        ),
        # The bound of configs/experiment/arithmetic_smollm2.yaml.
        objective=ObjectiveConfig(advantage="std", loss="grpo", kl_coef=0.0, mismatch_stop_float32=1e-3),
        reward=RewardConfig(functions=[RewardFunctionConfig(name="reasoning_gym")]),
        learner=LearnerConfig(
            lr=spec["lr"],
            max_grad_norm=spec["max_grad_norm"],
            max_tokens_per_micro_batch=spec["max_tokens_per_micro_batch"],
            logprob_chunk_tokens=spec["logprob_chunk_tokens"],
            activation_checkpointing=spec["activation_checkpointing"],
            recompute_granularity=spec["recompute_granularity"],
        ),
        cluster=ClusterConfig(colocate=True, cpus_per_worker=spec["threads"], rollout_gpus=gpus, learner_gpus=gpus),
    )


def find_facts(spec: dict[str, Any]) -> dict[str, Any]:
    """Prompts as ids, parameters and device. Prompts are random ones of one length, or with `data` its problems."""
    workload = ModelOptions.of(spec)
    model, tokenizer = models.load(workload)
    context = model.config.get_text_config().max_position_embeddings
    if spec["data"] is None:
        prompts = models.make_prompts(workload, tokenizer, spec["count"])
    else:
        prompts = problem_prompts(spec, tokenizer, context)
    return models.machine(model.device) | {
        "prompts": prompts,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "on_cuda": model.device.type == "cuda",
        "matrix_flops": matrix_flops(model.device),
    }


def problem_prompts(spec: dict[str, Any], tokenizer: Any, context: int) -> list[list[int]]:
    """spec["count"] prompts in a run's seeded order."""
    config = Config(
        run=RunConfig(seed=spec["seed"]),
        model=ModelConfig(path=spec["model"]),
        data=DataConfig(**spec["data"], prompts_per_step=1),
        rollout=RolloutConfig(max_new_tokens=spec["max_new_tokens"]),
        objective=ObjectiveConfig(kl_coef=0.0),
        reward=RewardConfig(functions=[RewardFunctionConfig(name="reasoning_gym")]),
    )
    stream = build_train_prompts(config, tokenizer, context)
    return [stream.next_batch()[0].token_ids.tolist() for _ in range(spec["count"])]
