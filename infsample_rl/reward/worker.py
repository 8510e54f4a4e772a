"""The reward worker: micro-groups in, floats out. A plain class; the cluster wraps it.

    decoded texts -> rule and user functions, in processes that can be killed  \\
                  -> reward models, here on the worker's device                 -> weighted sum, None where any part
                  failed
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Set
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from infsample_rl.config import Config
from infsample_rl.data.fields import RAW_ANSWER
from infsample_rl.model.loading import load_tokenizer
from infsample_rl.model.response_text import response_text
from infsample_rl.observe.phases import phase
from infsample_rl.reward.functions import component_names, kind_of
from infsample_rl.reward.process_pool import CallValues, ProcessPool
from infsample_rl.types import Completion, MaybeNone, Prompt, RewardResult

if TYPE_CHECKING:  # it imports torch, which rule rewards never need
    from infsample_rl.reward.reward_model import RewardModel

LARGEST_REWARD = 1e18  # in float32 its square is finite

Scored = tuple[list[float | None], list[str]]  # of one function: value and problem ("" for none) of every sample


class RewardWorker:
    """Scores micro-groups with every configured function."""

    def __init__(self, config: Config):
        """Start the function processes and load the reward models; ValueError in one line when one cannot be."""
        functions = config.reward.functions
        self.tokenizer = load_tokenizer(config.model)
        self.stop_strings = config.rollout.stop_strings
        self.answer_field = config.data.answer_field
        self.updates_per_step, self.steps = config.objective.updates_per_step, config.run.steps
        self.names = component_names(functions)
        self.weights = [function.weight for function in functions]
        kinds = [kind_of(function.name) for function in functions]
        self._scored = 0  # micro-groups
        self._models = {}
        if "model" in kinds:
            from infsample_rl.reward.reward_model import RewardModel  # here: only reward models need its imports

            device = "cuda" if config.cluster.reward_gpus > 0 else "cpu"
            for index, kind in enumerate(kinds):
                if kind == "model":
                    self._models[index] = RewardModel(functions[index], device)
        # position in the pool -> in functions
        self._in_pool = [index for index, kind in enumerate(kinds) if kind != "model"]
        self._pool: ProcessPool | MaybeNone = (
            ProcessPool(config.reward, [functions[index] for index in self._in_pool]) if self._in_pool else None
        )

    @property
    def num_timeouts(self) -> int:
        """Calls that were killed at their time limit since the start."""
        return self._pool.num_timeouts if self._pool else 0

    @property
    def num_deaths(self) -> int:
        """Processes that died in a call since the start."""
        return self._pool.num_deaths if self._pool else 0

    def progress(self) -> int:
        """Grows with every function call and micro-group that ends, and with every process that dies."""
        return self._scored + (self._pool.num_calls + self._pool.num_deaths if self._pool else 0)

    def statistics(self) -> dict[str, float]:
        """Sums since the start, by metric name."""
        return {"reward_timeouts": self.num_timeouts, "reward_deaths": self.num_deaths}

    @property
    def pids(self) -> list[int]:
        """Process ids of the running function processes."""
        return self._pool.pids if self._pool else []

    @phase("reward")
    def score(self, prompt: Prompt, completions: list[Completion]) -> RewardResult:
        """Rewards of completions of one prompt, in their order."""
        token_ids = [completion.token_ids.tolist() for completion in completions]
        texts = [response_text(self.tokenizer, ids, self.stop_strings) for ids in token_ids]
        return self.score_texts(prompt, texts, token_ids, step=completions[0].policy_version if completions else 0)

    def score_texts(
        self, prompt: Prompt, texts: list[str], token_ids: list[list[int]] | None = None, *, step: int = 0
    ) -> RewardResult:
        """Rewards of responses given as text; `token_ids` is what TRL's form gets as completion_ids, `step` counts in
        its trainer_state."""
        started_at = time.time()
        ids = (
            token_ids
            if token_ids is not None
            else [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        )
        samples = [{"text": text, "token_ids": list(row)} for text, row in zip(texts, ids, strict=True)]
        futures = self._submit(prompt, samples, step) if samples else {}
        # while they run
        scored: dict[int, Scored] = {
            index: _model_scores(model, prompt, texts) for index, model in self._models.items()
        }
        reported: dict[str, list[float | None]] = {}
        for index in self._in_pool:
            calls = [call for future in futures.get(index, []) for call in future.result()]
            scored[index] = ([v for call in calls for v in call.values], [p for call in calls for p in call.problems])
            reported |= _joined(self.names[index], calls)
        components = {
            name: [finite_or_none(value) for value in scored[index][0]] for index, name in enumerate(self.names)
        }
        problems = {name: scored[index][1] for index, name in enumerate(self.names)}
        rewards = weighted_sum(
            components,
            dict(zip(self.names, self.weights, strict=True)),
            len(texts),
            skipped=_skipped(components, problems),
        )
        for name, sample in _skipped_by_all(components, problems, len(texts)):
            problems[name][sample] = "returned None"
        for sample, reward in enumerate(rewards):
            if reward is None and not any(column[sample] for column in problems.values()):
                problems[self.names[0]][sample] = f"no reward: a weighted value is above {LARGEST_REWARD:g}"
        self._scored += 1
        return RewardResult(
            rewards=rewards,
            components=components | reported,
            failures=failure_lines(problems, prompt.row),
            started_at=started_at,
            finished_at=time.time(),
        )

    def close(self) -> None:
        """End the function processes."""
        if self._pool:
            self._pool.close()

    def _submit(
        self, prompt: Prompt, samples: list[dict[str, Any]], step: int
    ) -> dict[int, list[Future[list[CallValues]]]]:
        """Hand the samples to the pool: whole to forms that take many, else one sample a call, dealt to all
        processes."""
        assert self._pool is not None or not self._in_pool
        columns = {"row": prompt.row, "messages": prompt.messages, "text": prompt.text, "columns": prompt.columns}
        field = self.answer_field or "answer"
        given = RAW_ANSWER if field == "answer" and RAW_ANSWER in prompt.columns else field
        columns["label"] = prompt.columns.get(given, prompt.columns.get("answer"))
        columns["trainer_state"] = {
            "global_step": step * self.updates_per_step,  # TRL counts updates
            "max_steps": -1 if self.steps is None else self.steps * self.updates_per_step,
        }
        pickled = pickle.dumps(columns)
        futures: dict[int, list[Future[list[CallValues]]]] = {}
        for position, index in enumerate(self._in_pool):
            pool = self._pool
            calls = [[sample] for sample in samples] if pool.per_sample[position] else [samples]
            share = math.ceil(len(calls) / pool.num_processes)
            futures[index] = [
                pool.submit(position, pickled, calls[start : start + share]) for start in range(0, len(calls), share)
            ]
        return futures


def _model_scores(model: RewardModel, prompt: Prompt, texts: list[str]) -> Scored:
    """The model's scores; None for all samples, with the reason, when it cannot score them (its template refuses,
    memory runs out)."""
    try:
        return model.score(prompt.messages, texts)
    except Exception as error:
        return [None] * len(texts), [f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"] * len(
            texts
        )


def finite_or_none(value: float | None) -> float | None:
    """None for NaN and infinity."""
    return value if value is not None and math.isfinite(value) else None


def _joined(name: str, calls: list[CallValues]) -> dict[str, list[float | None]]:
    """What a function reported beside its values, under "FUNCTION/NAME", over all its calls; None where a call did not
    report it."""
    reported = dict.fromkeys(key for call in calls for key in call.reported)
    return {
        f"{name}/{key}": [v for call in calls for v in call.reported.get(key, [None] * len(call.values))]
        for key in reported
    }


def _skipped(components: dict[str, list[float | None]], problems: dict[str, list[str]]) -> set[tuple[str, int]]:
    """(function, sample) where a function left a sample out: None, and nothing wrong."""
    missing = {
        (name, sample) for name, column in components.items() for sample, value in enumerate(column) if value is None
    }
    return {(name, sample) for name, sample in missing if not problems[name][sample]}


def _skipped_by_all(
    components: dict[str, list[float | None]], problems: dict[str, list[str]], count: int
) -> list[tuple[str, int]]:
    """The first function and each sample that every function left out: it has no reward, which is to be said."""
    skipped = _skipped(components, problems)
    return [
        (next(iter(components)), sample)
        for sample in range(count)
        if all((name, sample) in skipped for name in components)
    ]


def weighted_sum(
    components: dict[str, list[float | None]],
    weights: dict[str, float],
    count: int,
    *,
    skipped: Set[tuple[str, int]] = frozenset(),
) -> list[float | None]:
    """Sum of weight x value for each of `count` samples; None where any value is, or where a term is above
    LARGEST_REWARD.

    `skipped`: (function, sample) that are left out of the sum, as TRL leaves out a function's None; None where all are.
    """
    rewards: list[float | None] = []
    for sample in range(count):
        values = {name: column[sample] for name, column in components.items() if (name, sample) not in skipped}
        terms = [weights[name] * value for name, value in values.items() if value is not None]
        terms = terms if len(terms) == len(values) else []
        rewards.append(math.fsum(terms) if terms and all(abs(term) <= LARGEST_REWARD for term in terms) else None)
    return rewards


def failure_lines(problems: dict[str, list[str]], row: int) -> list[str]:
    """One line for each different problem: "gsm8k: timed out after 30 s on prompt row 17 (4 samples)"."""
    lines = []
    for name, column in problems.items():
        for problem in dict.fromkeys(filter(None, column)):
            count = column.count(problem)
            lines.append(f"{name}: {problem} on prompt row {row} ({count} sample{'s' if count != 1 else ''})")
    return lines
