"""A checkpoint on a data set: python -m infsample_rl.evaluate CHECKPOINT [samples=8] [k=[1,4,8]] [name=value ...]

CHECKPOINT   RUN/checkpoints/step_N, whose run's data, template, sampling and rewards are the defaults; or any Hugging
Face folder or hub name
samples      completions of every problem (8)
k            pass@k is shown for these (1 and samples); a sample passes at a reward of threshold (0.5) or more
out          a JSONL file of every completion; json=true prints one JSON object instead of the table
section.key  any setting: data.source=FILE.jsonl, data.eval_source, run.eval_prompts=200, run.eval_temperature=0.6,
rollout.kv_budget_bytes=auto,
             reward=math. data.source alone is what is evaluated; without it the run's held-out problems are

pass@k is the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374, equation 1): 1 - C(n - c, k) / C(n, k) of a
problem with c of n samples right, and its mean over problems. Intervals are 95 %, over problems, since samples of one
are not independent: where every problem's figure is 0 or 1 (one sample a problem, or k = n) Wilson's, which also holds
when all are equal; else the bootstrap's percentiles, problems drawn with replacement, 10,000 times.

A sample whose reward failed is outside every figure, and a problem outside pass@k with fewer than k others.
The engine and the reward functions of training, without Ray. Exit codes: 0 done; 1 it failed, or a reward did; 2 an
input is wrong.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from infsample_rl.cluster.rollout_interpreter import check_rollout_interpreter
from infsample_rl.commands.estimates import Estimate, mean_over_problems, pass_at_k
from infsample_rl.commands.merge import open_policy
from infsample_rl.commands.run_settings import leading, load_run_config, model_and_run
from infsample_rl.commands.sampling_process import sample_held_out
from infsample_rl.config import ALL_PROBLEMS, Config, RunConfig
from infsample_rl.config.command_line import option, parse_with_settings, print_table, run_command
from infsample_rl.controller.checks import check_turns
from infsample_rl.controller.openings import Openings
from infsample_rl.controller.step_records import episode_record
from infsample_rl.data.prompts import build_eval_prompts, held_out_problems
from infsample_rl.model.architecture import context_of
from infsample_rl.model.loading import load_model_config
from infsample_rl.model.tokenizer import load_tokenizer, read_response
from infsample_rl.reward.checks import check_columns, check_reward_functions
from infsample_rl.reward.environment_host import EnvironmentHost
from infsample_rl.reward.worker import RewardWorker
from infsample_rl.types import Completion, Prompt, RewardResult, RolloutWork

Figures = dict[str, Estimate | float | int | None]
OF_A_RUN = {"run.eval_samples": "samples", "rollout.group_size": "samples", "data.split": "data.eval_split"}


@dataclass(kw_only=True)
class EvaluateOptions:
    """What is no setting of a run."""

    samples: int = option(8, "completions of every problem", low=1)
    k: list[int] = option([], "pass@k for these", low=1)
    threshold: float = option(0.5, "reward from which a sample passes", low=-1e6, high=1e6)
    json: bool = option(False, "print one JSON object")
    out: str | None = option(None, "JSONL file of every completion")


@dataclass(kw_only=True, slots=True)
class Sampled:
    """One problem with what was sampled for it, in sample order."""

    prompt: Prompt
    completions: dict[int, Completion] = field(default_factory=dict)
    rewards: dict[int, float | None] = field(default_factory=dict)
    components: dict[int, dict[str, float | None]] = field(default_factory=dict)


def split_arguments(arguments: list[str]) -> tuple[str, EvaluateOptions, list[str]]:
    """CHECKPOINT, the options here, and settings for Hydra. ValueError in one line."""
    (checkpoint,) = leading(arguments, "a checkpoint", "evaluate RUN/checkpoints/step_N [samples=8]")
    options, settings = parse_with_settings(arguments[1:], EvaluateOptions)
    options.k = options.k or sorted({1, options.samples})
    for k in options.k:
        pass_at_k(options.samples, 0, k)  # refuses a k above samples
    return checkpoint, options, settings


def evaluation_config(checkpoint: str, options: EvaluateOptions, overrides: list[str]) -> Config:
    """The run's settings, made fit for sampling alone, with as many problems as were asked for, 0 for all, or as the
    run's evaluations took. ValueError in one line."""
    ours, run_dir = model_and_run(checkpoint)
    names = {override.partition("=")[0].lstrip("+") for override in overrides}
    if run_dir is None and not names & {"data", "data.source", "data.sources", "data.eval_source"}:
        raise ValueError(
            f"CHECKPOINT={checkpoint} lies in no run folder: nothing says what to evaluate it on; give "
            "data.source=FILE and a reward, as reward=math"
        )
    for name in names & OF_A_RUN.keys():
        raise ValueError(f"{name} is of a run; give {OF_A_RUN[name]}= here")
    if names & {"data", "data.source"}:
        ours.append("data.sources=[]")  # of the run
    if "rollout.temperature" in names:
        ours.append("run.eval_temperature=null")  # of the run, which would be taken in its place
    config = load_run_config(run_dir, [*ours, f"rollout.group_size={options.samples}", *overrides])
    has_own_data = bool(names & {"data", "data.source"}) and "data.eval_source" not in names and config.data.source
    if has_own_data:
        config.data = dataclasses.replace(config.data, eval_source=config.data.source)
    held_out = [part.held_out for part in config.data.parts.values() if part.held_out is not None]
    if not held_out:
        sources = ", ".join(part.source for part in config.data.parts.values())
        hint = "give data.source=FILE or data.eval_source to evaluate on"
        raise ValueError(f"data.eval_source is none for data.source={sources}: {hint}")
    given = config.run.eval_prompts
    if any(source.startswith("reasoning_gym:") for source in held_out):  # there are as many as one asks for
        given = given or RunConfig().eval_prompts
    elif given == 0 or (run_dir is None or has_own_data) and "run.eval_prompts" not in names:
        given = ALL_PROBLEMS  # of data that the run was not evaluated on
    config.run = dataclasses.replace(config.run, eval_prompts=given)
    return config


def evaluate(
    config: Config, lm: PreTrainedModel | None, prompts: list[Prompt], environments: EnvironmentHost | None = None
) -> list[Sampled]:
    """Sample every problem and score its samples while others decode. `lm`: the native engine's model. `environments`:
    of samples of several turns."""
    config = _of_one_worker(config, longest=max(len(prompt.token_ids) for prompt in prompts))
    found, samples = [Sampled(prompt=prompt) for prompt in prompts], list(range(config.rollout.group_size))
    work = [
        RolloutWork(prompt_index=index, prompt_ids=prompt.token_ids, sample_indices=samples, start=prompt.start)
        for index, prompt in enumerate(prompts)
    ]
    worker, scorer = RewardWorker(config), ThreadPoolExecutor(1)
    try:
        scored = [
            (group, scorer.submit(worker.score, [(prompts[group[0].prompt_index], group)]))
            for group in sample_held_out(config, work, lm, environments)
        ]
        for group, future in scored:
            (result,) = future.result()
            _enter(found[group[0].prompt_index], group, result)
    finally:
        scorer.shutdown(cancel_futures=True)  # else Ctrl-C would wait for all that wait
        worker.close()
    return found


def _of_one_worker(config: Config, *, longest: int) -> Config:
    """The settings of a run whose only rollout worker has the machine and whole weights, for prompts of up to `longest`
    tokens."""
    gpus = 1.0 if torch.cuda.is_available() else 0.0
    cluster = dataclasses.replace(
        config.cluster,
        colocate=False,
        rollout_workers=1,
        rollout_gpus=gpus,
        reward_gpus=gpus,
        cpus_per_worker=torch.get_num_threads(),
    )
    return dataclasses.replace(
        config,
        cluster=cluster,
        data=dataclasses.replace(config.data, max_prompt_tokens=longest),
        learner=dataclasses.replace(config.learner, lora_rank=0),
        run=dataclasses.replace(config.run, dir=None),  # what it keeps of environments is the run's own
    )


def _enter(sampled: Sampled, completions: list[Completion], result: RewardResult) -> None:
    for position, completion in enumerate(completions):
        index = completion.sample_index
        sampled.completions[index], sampled.rewards[index] = completion, result.rewards[position]
        sampled.components[index] = {name: values[position] for name, values in result.components.items()}
    for failure in result.failures:
        print(f"reward failed: {failure}", file=sys.stderr)


def summarise(found: list[Sampled], options: EvaluateOptions, *, seed: int) -> Figures:
    """Figures by name, of the samples that have a reward; None where too few have one."""
    scored = [(s.prompt.source, [reward for reward in s.rewards.values() if reward is not None]) for s in found]
    scored = [(source, rewards) for source, rewards in scored if rewards]
    completions = [completion for sampled in found for completion in sampled.completions.values()]
    lengths = [[len(completion.token_ids) for completion in sampled.completions.values()] for sampled in found]
    values = {"reward": [statistics.fmean(rewards) for _, rewards in scored]}
    for k in options.k:
        groups = [rewards for _, rewards in scored if len(rewards) >= k]
        right = [sum(reward >= options.threshold for reward in rewards) for rewards in groups]
        values[f"pass@{k}"] = [pass_at_k(len(group), count, k) for group, count in zip(groups, right, strict=True)]
    for source in dict.fromkeys(sampled.prompt.source for sampled in found if sampled.prompt.source):
        values[f"reward of {source}"] = [statistics.fmean(rewards) for own, rewards in scored if own == source]
    figures: Figures = {"problems": len(found), "samples": options.samples}
    figures |= {name: mean_over_problems(each, seed=seed) if each else None for name, each in values.items()}
    figures["length"] = mean_over_problems([statistics.fmean(group) for group in lengths], seed=seed)
    figures["longest"] = max(max(group) for group in lengths)
    figures["cut"] = sum(completion.finish_reason == "length" for completion in completions) / len(completions)
    figures["failed rewards"] = sum(reward is None for sampled in found for reward in sampled.rewards.values())
    return figures


def write_completions(found: list[Sampled], path: Path, config: Config) -> None:
    """A line for every sample: problem, text, reward and what it is made of."""
    tokenizer, stop_strings = load_tokenizer(config.model), config.rollout.stop_strings
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for sampled in found:
            for index in sorted(sampled.completions):
                completion = sampled.completions[index]
                response = read_response(tokenizer, completion, stop_strings)
                record: dict[str, Any] = {"row": sampled.prompt.place, "sample_index": index}
                record |= {"prompt": sampled.prompt.text, "response": response.text}
                record |= {"reward": sampled.rewards[index], "components": sampled.components[index]}
                record |= {"length": len(completion.token_ids), "finish_reason": completion.finish_reason}
                record |= episode_record(completion.episode, response)
                file.write(json.dumps(record, ensure_ascii=False) + "\n")


def show(figures: Figures, title: str) -> None:
    """The figures as a table."""
    rows = []
    for name, value in figures.items():
        row = {"name": name, "value": f"{value:,}" if isinstance(value, int) else "-", "interval": "", "method": ""}
        if isinstance(value, float):
            row["value"] = f"{value:.4f}"
        elif isinstance(value, Estimate):
            middle, low, high = (
                format(x, ",.1f" if name == "length" else ".4f") for x in (value.value, value.low, value.high)
            )
            row |= {"value": middle, "interval": f"{low} to {high}", "method": f"{value.interval} over problems"}
        rows.append(row)
    print(title)
    print_table(rows, {"name": "", "value": "value", "interval": "95 % interval", "method": ""})


def _check_out(path: Path, config: Config) -> None:
    """ValueError for a file that could not be written when all is sampled, or that is read."""
    sources = [source for part in config.data.parts.values() for source in (part.source, part.eval_source)]
    read = [Path(source).expanduser().resolve() for source in sources if source]
    if path.resolve() in read:
        raise ValueError(f"out={path} is the data that is evaluated on; give another file")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"out={path} cannot be written; give a file in a folder that is there")


def _run(arguments: list[str]) -> int:
    checkpoint, options, overrides = split_arguments(arguments)
    config = evaluation_config(checkpoint, options, overrides)
    if options.out is not None:
        _check_out(Path(options.out).absolute(), config)
    check_rollout_interpreter(config)
    with open_policy(config.model, config.rollout.engine) as (config.model, lm):
        found = _sample_and_score(config, lm)
        if options.out is not None:
            write_completions(found, Path(options.out), config)
    figures = summarise(found, options, seed=config.run.seed)
    if options.json:
        print(json.dumps(figures, default=dataclasses.asdict))
    else:
        show(figures, _title(checkpoint, config, options))
    if failed := figures["failed rewards"]:
        raise RuntimeError(f"{failed} of {len(found) * options.samples} rewards failed, they are outside all figures")
    return 0


def _sample_and_score(config: Config, lm: PreTrainedModel | None) -> list[Sampled]:
    """All problems, evaluated. ValueError for settings, rows and rewards that do not fit each other."""
    needs = check_reward_functions(config.reward, config.environment.factory)
    tokenizer = load_tokenizer(config.model)
    architecture = load_model_config(config.model) if lm is None else lm.config.get_text_config()
    environments = EnvironmentHost(config) if config.environment.is_set else None
    openings = Openings(config, tokenizer, environments)
    try:
        offered = check_turns(config, tokenizer, architecture, environments)
        problems = check_columns(config, needs, held_out_problems(config), evaluation=True)
        prompts = build_eval_prompts(config, tokenizer, context_of(architecture), offered, problems)
        return evaluate(config, lm, openings.open(prompts, position=-len(prompts)), environments)
    finally:
        openings.close()


def _title(checkpoint: str, config: Config, options: EvaluateOptions) -> str:
    temperature = config.rollout.temperature if config.run.eval_temperature is None else config.run.eval_temperature
    sources = " and ".join(part.held_out for part in config.data.parts.values() if part.held_out is not None)
    title = f"{checkpoint} on {sources}, temperature {temperature:g}"
    return f"{title}, a sample passes at a reward of {options.threshold:g}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run_command(_run, arguments, usage=__doc__)
