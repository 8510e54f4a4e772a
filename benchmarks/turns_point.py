"""Our engine on trajectories with real waits, in the process that `process.measure` starts."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import models
from benchmarks.models import rollout_config
from benchmarks.workload import Workload
from infsample_rl.model.peak_memory import PeakMemory
from infsample_rl.rollout.engine.sampling_engine import SamplingEngine
from infsample_rl.rollout.engine.turns import Answer
from infsample_rl.rollout.schedule.prompt_group import Sample
from infsample_rl.types import Episode

STATISTICS = ("running_steps", "peak_kv_bytes", "kv_pool_bytes", "preemptions", "recomputed_tokens", "parked_tokens")


class ScriptedTurns:
    """Answers turns (engine/turns.py) with observations of stated lengths, after stated waits."""

    def __init__(self, trajectories: Sequence[dict[str, Any]], group_size: int, words: Sequence[int]) -> None:
        """`trajectories`: of every sample in order, `observed` tokens and `seconds` behind each turn but the last.
        `words`: the ids that observations are of, from the first to before the second."""
        self.lengths: list[list[int]] = [[] for _ in trajectories]  # of the turns that were sampled
        self._trajectories, self._group_size, self._words = trajectories, group_size, words
        self._begun = [0] * len(trajectories)  # tokens before the turn that is sampled
        self._due: list[tuple[float, int, Sample, list[int]]] = []
        self._ended: list[Answer] = []

    def end(self, sample: Sample, reason: str) -> None:
        """As Turns.end."""
        index = sample.group.prompt_index * self._group_size + sample.sample_index
        script, lengths, tokens = self._trajectories[index], self.lengths[index], len(sample.tokens)
        if tokens > self._begun[index]:  # else its last observation had no room
            lengths.append(tokens - self._begun[index])
        turn = len(lengths) - 1
        if reason == "length" or turn == len(script["observed"]):
            episode = Episode(
                reward=0.0, failure="", turns=turn + 1, calls=turn, waited_s=sum(script["seconds"][:turn])
            )
            self._ended.append(Answer(sample, [], episode))
            return
        dice = random.Random(f"{index}/{turn}")
        observed = dice.choices(range(*self._words), k=script["observed"][turn])
        self._begun[index] = tokens + len(observed)
        heapq.heappush(self._due, (time.monotonic() + script["seconds"][turn], index, sample, observed))

    def take(self, *, wait_s: float) -> list[Answer]:
        """As Turns.take."""
        if not self._ended and self._due and wait_s > 0:
            time.sleep(min(wait_s, max(0.0, self._due[0][0] - time.monotonic())))
        found, self._ended = self._ended, []
        while self._due and self._due[0][0] <= time.monotonic():
            _, _, sample, observed = heapq.heappop(self._due)
            found.append(Answer(sample, observed, None))
        return found

    def close(self) -> None:
        """As Turns.close."""


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds, what the turns were, and the engine's own figures, after a call of plain samples that warms up."""
    options, workload = spec["workload"], Workload.of(spec["workload"])
    torch.set_num_threads(workload.threads)
    memory = PeakMemory(models.pick_device(workload))
    model, tokenizer = models.load(workload)
    *prompts, warm_up = models.make_prompts(workload, tokenizer, options["num_prompts"] + 1)
    stops = set(range(0, len(tokenizer), options["stop_every"]))
    words = [len(tokenizer) // 2, len(tokenizer)]
    memory.reset()
    config = rollout_config(
        options, schedule="token_budget", slots=None, kv_budget_tokens=options["kv_budget_tokens"], predictor="none"
    )
    engine = SamplingEngine(model, tokenizer, config, stop_token_ids=stops)
    engine.generate([warm_up], seed=workload.seed)
    turns = ScriptedTurns(options["script"], options["group_size"], words)
    started = time.perf_counter()
    for _ in engine.stream(prompts, seed=workload.seed + 1, turns=turns):
        pass
    seconds = time.perf_counter() - started
    found = {name: getattr(engine.stats, name) for name in STATISTICS}
    found |= {"seconds": seconds, "lengths": [sum(each) for each in turns.lengths], "turns": turns.lengths}
    found |= {"peak_memory_bytes": memory.peak_bytes(), "kv_bytes_per_token": models.kv_bytes_per_token(model)}
    return found | models.machine(model.device) | {"words": words, "prompts": prompts, "stop_ids": []}
