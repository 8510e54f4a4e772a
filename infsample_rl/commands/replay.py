"""A recorded step into the learner alone: python -m infsample_rl replay RUN step=K [json=true] [section.key=value ...]

RUN  a run with logging.record_every; step K needs the checkpoint it began from, checkpoints/step_<K-1>
(run.checkpoint_every=1
     run.keep_checkpoints=100 keep all), or for step 1 the model itself

One process, unsharded; any setting of the update may be changed, to see what it does to the same samples. Loss,
gradient norm and the difference of engine and learner are shown beside the run's own. The other half, the scheduler on
a run's lengths without a model, is python -m infsample_rl.simulate lengths=RUN. Exit codes: 0 done; 1 it failed; 2 an
input is wrong.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infsample_rl.commands.run_settings import is_run_folder, leading, load_run_config
from infsample_rl.config import Config
from infsample_rl.config.command_line import option, parse_with_settings, print_table, run_command
from infsample_rl.controller import checkpoints
from infsample_rl.controller.groups import Group, loss_totals, mini_batches, trainable_specs
from infsample_rl.controller.recording import RecordedStep, read_recording
from infsample_rl.controller.step_metrics import Metrics, update_metrics
from infsample_rl.learner.reference import ReferenceWorker
from infsample_rl.learner.row_plan import RowPlanner, assemble
from infsample_rl.learner.worker import LearnerWorker
from infsample_rl.types import Completion, ReferenceResult, TrainingSample

# of sections that made what is recorded, the settings that the update reads too
READ: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("data", "environment", "reward", "logging"), ()),
    "rollout": ("temperature", "max_new_tokens"),
    "run": ("deterministic",),
}
IN_ADVANTAGES = (
    *("objective.advantage", "objective.turn_credit", "objective.kl_reward_coef"),
    *("objective.overlong_buffer_tokens", "objective.overlong_penalty"),
    *("objective.dynamic_sampling", "objective.dynamic_sampling_rounds"),
)


@dataclass(kw_only=True)
class ReplayOptions:
    """What is no setting of a run."""

    step: int = option(0, "the step", low=1)
    json: bool = option(False, "print one JSON object")


def replay_config(run_dir: Path, overrides: list[str]) -> Config:
    """The run's settings for one learner rank in this process. ValueError in one line."""
    gpus = int(torch.cuda.is_available())
    ours = ["cluster.learner_ranks=1", "cluster.colocate=false", "learner.backend=fsdp", "learner.shard_ranks=null"]
    ours += [f"cluster.{role}_gpus={gpus}" for role in ("learner", "reference")]
    ours += ["objective.kl_reward_coef=0"]  # it is in the recorded advantages
    for override in overrides:
        name = override.partition("=")[0].lstrip("+~")
        section, _, key = name.partition(".")
        if key not in READ.get(section, (key,)) or name in IN_ADVANTAGES:
            raise ValueError(
                f"{override} has no part in a replay: samples, rewards and advantages are the recorded ones; leave it "
                "out"
            )
    return load_run_config(run_dir, [*ours, *overrides])


def start_of(run_dir: Path, step: int) -> Path | None:
    """The checkpoint a step began from, None: the model itself. ValueError when it was not kept."""
    if step == 1:
        return None
    kept = {int(folder.name[5:]): folder for folder in checkpoints.checkpoints(run_dir)}
    if step - 1 not in kept:
        there = ", ".join(map(str, kept)) or "none"
        raise ValueError(
            f"step={step} began from checkpoint {step - 1}, which {run_dir} has not kept (there are: {there}); "
            "set run.checkpoint_every=1 run.keep_checkpoints=100 in a run to keep all"
        )
    return kept[step - 1]


def replay(config: Config, recorded: RecordedStep, checkpoint: Path | None) -> Metrics:
    """Metrics of the recorded step's updates, made from `checkpoint`."""
    reports, objective = [], config.objective
    groups = [dataclasses.replace(group, needs_rewards=objective.reward_coef > 0) for group in recorded.groups]
    recorded = dataclasses.replace(recorded, groups=groups)
    batches = mini_batches(recorded.groups, objective.mini_batches)
    references = _reference_logprobs(recorded, config)
    plans = [list(_rows(batch, recorded, references, config)) for batch in batches]
    worker = LearnerWorker(config, rank=0, world_size=1, total_steps=recorded.total_steps)
    worker.setup(None if checkpoint is None else str(checkpoint))
    rows = [row for plan in plans for row in plan]
    ids = {id(row): number for number, row in enumerate(rows)} if objective.updates_per_step > 1 else {}
    try:
        for row in (row for plan in plans[1:] for row in plan):  # their first pass comes after an update
            worker.remember(row, ids[id(row)])
        for epoch in range(objective.epochs):
            for batch, plan in zip(batches, plans, strict=True):
                totals = loss_totals(batch, config)
                for row in plan:
                    worker.accumulate(row, totals, ids.get(id(row)))
                is_last = epoch + 1 == objective.epochs and batch is batches[-1]
                reports.append(worker.step(totals, is_last=is_last))
    finally:
        worker.close()
    metrics = update_metrics(reports)
    # of a KL in the reward alone nothing is computed here
    return metrics if objective.reference_in_loss else metrics | {"learner/kl": None}


def _reference_logprobs(recorded: RecordedStep, config: Config) -> list[ReferenceResult]:
    """What the run's reference workers say of every group's samples; empty where it has none, or nothing reads it."""
    if not config.objective.reference_in_loss or config.reference.placement == "learner":
        return []
    worker = ReferenceWorker(config)
    return [
        worker.logprobs(group.prompt, completions)
        for group, completions in zip(recorded.groups, _by_group(recorded), strict=True)
    ]


def _by_group(recorded: RecordedStep) -> list[list[Completion]]:
    """Each group's samples, as a rollout worker would deliver them together."""
    return [[recorded.completions[sample.position] for sample in group.samples] for group in recorded.groups]


def _rows(
    groups: list[Group], recorded: RecordedStep, references: list[ReferenceResult], config: Config
) -> Iterator[list[TrainingSample]]:
    """Packed learner rows of some groups."""
    samples = _by_group(recorded)
    prompts = {group.prompt.prompt_index: group.prompt.token_ids for group in recorded.groups}
    planner = RowPlanner(
        config.learner.max_tokens_per_micro_batch,
        {index: len(ids) for index, ids in prompts.items()},
        long_rows=config.long_rows,
    )
    rows = [row for group in groups for row in planner.add_group(trainable_specs(group, config))]
    for row in rows + planner.flush():
        yield assemble(row, prompts, samples, references)


def compare(run: dict[str, Any], replayed: Metrics) -> list[dict[str, Any]]:
    """Both figures of every name and their difference relative to the run's, as text."""
    rows = []
    for name, given in run.items():
        found = replayed.get(name)
        if given is None or found is None:
            continue
        was, now = float(given), float(found)
        difference = abs(now - was) / abs(was) if was else abs(now)
        rows.append({"name": name, "run": f"{was:.6g}", "replay": f"{now:.6g}", "difference": f"{difference:.1e}"})
    return rows


def _run(arguments: list[str]) -> int:
    (given,) = leading(arguments, "a run folder", "replay RUN step=K")
    run_dir = Path(given).expanduser().absolute()
    if not is_run_folder(run_dir):
        what = "is no run folder: it has no config.yaml" if run_dir.is_dir() else "is no folder"
        raise ValueError(f"RUN={given} {what}")
    options, overrides = parse_with_settings(arguments[1:], ReplayOptions)
    if options.step == 0:
        raise ValueError("give the step: python -m infsample_rl replay RUN step=K")
    recorded, checkpoint = read_recording(run_dir, options.step), start_of(run_dir, options.step)
    config = replay_config(run_dir, overrides)
    replayed = replay(config, recorded, checkpoint)
    if options.json:
        print(json.dumps({"step": options.step, "run": recorded.metrics, "replay": replayed}))
        return 0
    start = checkpoint or config.model.path
    print(f"step {options.step} of {run_dir}, from {start}: {len(recorded.completions)} samples")
    columns = {"name": "", "run": "run", "replay": "replay", "difference": "relative"}
    print_table(compare(recorded.metrics, replayed), columns)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run_command(_run, arguments, usage=__doc__)
