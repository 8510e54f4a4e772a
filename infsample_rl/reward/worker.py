"""The reward worker: micro-groups in, floats out. A plain class; the cluster wraps it.

    decoded texts -> rule and user functions, in processes that can be killed  \\
                  -> reward models, here on the worker's device                 -> weighted sum, None where any part
                  -> judges, over the network                                  /   failed
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from infsample_rl.config import Config
from infsample_rl.config.reward import ENVIRONMENT, JudgeConfig
from infsample_rl.data.fields import RAW_ANSWER
from infsample_rl.model.tokenizer import load_tokenizer, response_text
from infsample_rl.observe.phases import phase
from infsample_rl.reward.functions import IN_PROCESSES, component_names, kind_of, takes_one
from infsample_rl.reward.hidden_values import hide_values_of
from infsample_rl.reward.judge import Judge
from infsample_rl.reward.process_pool import CallValues, ProcessPool
from infsample_rl.types import Completion, Episode, MaybeNone, Prompt, RewardResult

if TYPE_CHECKING:  # it imports torch, which rule rewards never need
    from infsample_rl.reward.reward_model import RewardModel


LARGEST_REWARD = 1e18  # in float32 its square is finite


@dataclass
class Scored:
    """What one function gave for each sample: its value and what went wrong ("" for nothing). A value of None where
    nothing went wrong is left out of the sum, as TRL leaves it out."""

    weight: float
    values: list[float | None] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class _Begun(NamedTuple):
    """A micro-group whose functions run."""

    prompt: Prompt
    texts: list[str]
    episodes: list[Episode | None]
    futures: dict[int, list[Future[list[CallValues]]]]  # place in reward.functions: those of its calls, in order
    started_at: float


class RewardWorker:
    """Scores micro-groups with every configured function."""

    def __init__(self, config: Config):
        """Start the function processes and load the reward models; ValueError in one line when one cannot be."""
        functions = config.reward.functions
        self.tokenizer = load_tokenizer(config.model)
        self.stop_strings = config.rollout.stop_strings
        self.updates_per_step, self.steps = config.objective.updates_per_step, config.run.steps
        self.names = component_names(functions)
        self.weights = [function.weight for function in functions]
        self._of_source = {source: config.rewards_of(source) for source in config.data.parts}
        self._labels = {source: part.answer_field or "answer" for source, part in config.data.parts.items()}
        self._scored = 0  # micro-groups
        self._models: dict[int, RewardModel] = {}
        in_models = [index for index, function in enumerate(functions) if kind_of(function.name) == "model"]
        if in_models:
            from infsample_rl.reward.reward_model import RewardModel  # here: only reward models need its imports

            device = "cuda" if config.cluster.reward_gpus > 0 else "cpu"
            self._models = {index: RewardModel(functions[index], device) for index in in_models}
        hide_values_of(judge.key for judge in config.reward.judges if judge.key is not None)
        self._judges = {
            index: Judge(function, config.reward.timeout_s)
            for index, function in enumerate(functions)
            if isinstance(function, JudgeConfig)
        }
        # position in the pool -> in functions
        self._in_pool = [index for index, function in enumerate(functions) if kind_of(function.name) in IN_PROCESSES]
        self._pool: ProcessPool | MaybeNone = (
            ProcessPool(config.reward, [functions[index] for index in self._in_pool]) if self._in_pool else None
        )
        forms = dict(zip(self._in_pool, self._pool.forms, strict=True)) if self._pool else {}
        self._of_environment = {
            index
            for index, each in enumerate(functions)
            if each.name == ENVIRONMENT or forms.get(index) == "environments"
        }

    def progress(self) -> int:
        """Grows with every function call, verdict and micro-group that ends, and with every process that dies."""
        in_pool = self._pool.num_calls + self._pool.num_deaths if self._pool else 0
        return self._scored + in_pool + sum(judge.num_replies for judge in self._judges.values())

    @phase("reward")
    def score(self, asked: Sequence[tuple[Prompt, list[Completion]]]) -> list[RewardResult]:
        """Rewards of micro-groups, each of completions of one prompt, in their order. All are begun before the first is
        waited for."""
        begun = []
        for prompt, completions in asked:
            token_ids = [completion.token_ids.tolist() for completion in completions]
            texts = [response_text(self.tokenizer, ids, self.stop_strings) for ids in token_ids]
            step = completions[0].policy_version if completions else 0
            episodes = [completion.episode for completion in completions]
            begun.append(self._begin(prompt, texts, token_ids, step, episodes))
        return list(map(self._finish, begun))

    def _begin(
        self,
        prompt: Prompt,
        texts: list[str],
        token_ids: list[list[int]],
        step: int,
        episodes: list[Episode | None],
    ) -> _Begun:
        samples = [
            {"text": text, "token_ids": row, "messages": episode.messages if episode else None}
            for text, row, episode in zip(texts, token_ids, episodes, strict=True)
        ]
        return _Begun(prompt, texts, episodes, self._submit(prompt, samples, step) if samples else {}, time.time())

    def _finish(self, begun: _Begun) -> RewardResult:
        prompt, texts, episodes, futures, started_at = begun
        chosen = self._of_source[prompt.source]
        scored = {self.names[index]: Scored(self.weights[index]) for index in chosen}
        reported: dict[str, list[float | None]] = {}
        for index in (index for index in chosen if index in self._models):  # while the processes run
            of_model = scored[self.names[index]]
            of_model.values, of_model.problems = _model_scores(self._models[index], prompt, texts)
        for index in (index for index in chosen if index in self._of_environment):
            own, name = scored[self.names[index]], self.names[index]
            own.values, own.problems = _episode_rewards(episodes, None if name == ENVIRONMENT else name)
            for key in dict.fromkeys(key for each in episodes if each for key in each.reported):
                if key.startswith(f"{name}/"):
                    reported[key] = [each.reported.get(key) if each else None for each in episodes]
        for index, pieces in futures.items():
            name = self.names[index]
            calls = [call for future in pieces for call in future.result()]
            scored[name].values = [value for call in calls for value in call.values]
            scored[name].problems = [problem for call in calls for problem in call.problems]
            for key in dict.fromkeys(key for call in calls for key in call.reported):
                columns = [call.reported.get(key, [None] * len(call.values)) for call in calls]
                reported[f"{name}/{key}"] = [value for column in columns for value in column]
        failed = Scored(0.0, [None] * len(texts), [episode.failure if episode else "" for episode in episodes])
        for column in scored.values():  # nor does any other function's value count of what its failure cut off
            pairs = zip(column.values, failed.problems, strict=True)
            column.values = [None if problem else value for value, problem in pairs]
        # of no function there is nothing that could fail: objective.reward_coef=0 needs none
        rewards = weighted_sums([*scored.values(), failed] if scored else [], len(texts))
        problems = [(ENVIRONMENT, failed.problems), *((name, column.problems) for name, column in scored.items())]
        self._scored += 1
        return RewardResult(
            rewards=rewards,
            components={name: column.values for name, column in scored.items()} | reported,
            failures=failure_lines(problems, prompt.place),
            started_at=started_at,
            finished_at=time.time(),
        )

    def close(self) -> None:
        """End the function processes and the judges' threads."""
        if self._pool:
            self._pool.close()
        for judge in self._judges.values():
            judge.close()

    def _submit(
        self, prompt: Prompt, samples: list[dict[str, Any]], step: int
    ) -> dict[int, list[Future[list[CallValues]]]]:
        """Hand the samples to judges, and to the pool: whole to forms that take many, else one sample a call, dealt to
        all processes."""
        columns = {"row": prompt.row, "messages": prompt.messages, "text": prompt.text, "columns": prompt.columns}
        name = self._labels[prompt.source]
        given = RAW_ANSWER if name == "answer" and RAW_ANSWER in prompt.columns else name
        columns["label"] = prompt.columns.get(given, prompt.columns.get("answer"))
        columns["trainer_state"] = {
            "global_step": step * self.updates_per_step,  # TRL counts updates
            "max_steps": -1 if self.steps is None else self.steps * self.updates_per_step,
        }
        pickled = pickle.dumps(columns)
        chosen, texts = self._of_source[prompt.source], [sample["text"] for sample in samples]
        futures = {index: [self._judges[index].submit(prompt, texts)] for index in chosen if index in self._judges}
        for index in (index for index in chosen if index in self._in_pool and index not in self._of_environment):
            pool, position = self._pool, self._in_pool.index(index)
            calls = [[sample] for sample in samples] if takes_one(pool.forms[position]) else [samples]
            share = math.ceil(len(calls) / pool.num_processes)
            futures[index] = [
                pool.submit(position, pickled, calls[start : start + share]) for start in range(0, len(calls), share)
            ]
        return futures


def _episode_rewards(episodes: list[Episode | None], function: str | None) -> tuple[list[float | None], list[str]]:
    """What environments gave, or a function of reward.functions gave of them, and why there is nothing; of one that
    failed its failure says it."""
    problems = ["there was no environment" if episode is None else "" for episode in episodes]
    if function is not None:  # None of TRL's form: it does not apply
        return [None if episode is None else episode.function_rewards.get(function) for episode in episodes], problems
    for place, episode in enumerate(episodes):
        if episode is not None and episode.reward is None and not episode.failure:
            problems[place] = "it has no get_reward"
    return [None if episode is None else episode.reward for episode in episodes], problems


def _model_scores(model: RewardModel, prompt: Prompt, texts: list[str]) -> tuple[list[float | None], list[str]]:
    """The model's scores and problems; None for all samples, with the reason, when it cannot score them (its template
    refuses, memory runs out)."""
    try:
        return model.score(prompt.messages, texts)
    except Exception as error:
        problem = f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return [None] * len(texts), [problem] * len(texts)


def weighted_sums(columns: list[Scored], count: int) -> list[float | None]:
    """Sum of weight x value for each of `count` samples; None where any function failed, where all left it out or where
    a term is above LARGEST_REWARD, the last two with a problem of the first function, if there is any."""
    if not columns:
        return [None] * count
    rewards: list[float | None] = []
    for sample in range(count):
        terms = [(column.weight, column.values[sample]) for column in columns]
        values = [weight * value for weight, value in terms if value is not None]
        has_failed = any(column.problems[sample] for column in columns)
        is_sum = bool(values) and all(abs(value) <= LARGEST_REWARD for value in values)
        rewards.append(math.fsum(values) if is_sum and not has_failed else None)
        if not has_failed and not is_sum:
            too_large = f"no reward: a weighted value is above {LARGEST_REWARD:g}"
            columns[0].problems[sample] = too_large if values else "returned None"
    return rewards


def failure_lines(problems: Sequence[tuple[str, list[str]]], row: int | str) -> list[str]:
    """One line for each different problem: "gsm8k: timed out after 30 s on prompt row 17 (4 samples)"."""
    lines = []
    for name, column in problems:
        for problem in dict.fromkeys(filter(None, column)):
            count = column.count(problem)
            lines.append(f"{name}: {problem} on prompt row {row} ({count} sample{'s' if count != 1 else ''})")
    return lines
