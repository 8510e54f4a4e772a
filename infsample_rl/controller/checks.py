"""Everything that is checked before Ray starts, and what a start changes in the run folder once its workers run."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
import yaml
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from infsample_rl.cluster.rollout_interpreter import check_rollout_interpreter
from infsample_rl.cluster.worker_secrets import check_reward_environment
from infsample_rl.config import Config
from infsample_rl.config.reward import ENVIRONMENT
from infsample_rl.controller import checkpoints
from infsample_rl.controller.inputs import Inputs
from infsample_rl.controller.openings import Openings
from infsample_rl.controller.start_table import (
    context_warnings,
    derived_table,
    sampling_warnings,
    setting_warnings,
)
from infsample_rl.data.chat import NO_TOOLS, Tools
from infsample_rl.data.prompts import PromptStream, build_eval_prompts, build_train_prompts
from infsample_rl.data.turns import templates_of
from infsample_rl.learner.optimizer import check_optimizer
from infsample_rl.model.architecture import check_full_attention, context_of, last_hidden_size
from infsample_rl.model.disk import check_disk_folder
from infsample_rl.model.generation import load_generation_config, stop_ids_of
from infsample_rl.model.loading import load_model_config
from infsample_rl.model.lora import check_lora
from infsample_rl.model.policy_head import masked_index
from infsample_rl.model.tokenizer import check_reference, load_tokenizer
from infsample_rl.model.weight_slices import check_weights
from infsample_rl.model.weight_sync.transport import choose_transport
from infsample_rl.observe.files import write_atomically
from infsample_rl.observe.trackers.trackers import check_trackers, reach_trackers
from infsample_rl.observe.versions import write_versions
from infsample_rl.plan.at_start import FILE, plan_at_start
from infsample_rl.plan.placement import Node, refusal, total_cpus
from infsample_rl.reward.checks import check_environment_columns
from infsample_rl.reward.environment_host import EnvironmentHost
from infsample_rl.rollout.engine.stop_strings import StopStrings
from infsample_rl.rollout.length_prediction.run_bert import RunBert
from infsample_rl.rollout.length_prediction.run_probe import RunProbe
from infsample_rl.types import Prompt


@dataclass(kw_only=True, slots=True)
class Start:
    """A run that can begin: its inputs are there and its settings fit them."""

    prompts: PromptStream
    eval_prompts: list[Prompt]
    tokenizer: PreTrainedTokenizerBase
    total_steps: int
    step: int = 0  # updates already done, in the run that is resumed
    expected_lengths: dict[str, Any] | None = None  # dealing.ExpectedLengths.state() of that run
    checkpoint: Path | None
    table: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str]  # what the user should know of the settings before the run begins
    probe: RunProbe | RunBert | None  # what of the run learns lengths
    lock: TextIO | None  # of the run folder, once it is there; held while the process lives
    openings: Openings
    plan: str | None = None  # plan.json


def prepare(config: Config, inputs: Inputs) -> Start:
    """Check everything that can be checked without starting anything. ValueError, in one line, for what cannot work."""
    run_dir = Path(config.run.dir or ".")
    # A folder that is there is locked before it is looked into: a process that SIGTERM ends may still save a
    # checkpoint.
    lock = checkpoints.lock_run_folder(run_dir) if os.path.isdir(run_dir) else None
    try:
        if lock is None:
            checkpoints.check_new_folder(run_dir)
        start = _prepare(config, inputs, run_dir, lock)
        reach_trackers(config)  # the last: it may take a while
        return start
    except BaseException:
        if lock is not None:
            lock.close()
        raise


def _prepare(config: Config, inputs: Inputs, run_dir: Path, lock: TextIO | None) -> Start:
    checkpoint, damages = checkpoints.find_checkpoint(run_dir, config.run.resume)
    _check_surroundings(config)
    architecture, tokenizer = load_model_config(config.model), load_tokenizer(config.model)
    check_full_attention(architecture)
    left_out = check_weights(config.model)
    check_reference(config, tokenizer)
    if config.objective.needs_reference and config.reference.path not in (None, config.model.path):
        reference = dataclasses.replace(config.model, path=config.reference.path)
        check_full_attention(load_model_config(reference, "reference.path"))
        left_out += check_weights(reference, "reference.path")
    trained = check_lora(config, architecture, checkpoint)
    _check_tokens(config, tokenizer, architecture)
    context = context_of(architecture)
    environments = EnvironmentHost(config) if config.environment.is_set else None
    offered = check_turns(config, tokenizer, architecture, environments)
    train, evaluated = inputs.train, inputs.held_out
    if environments is not None:
        train = check_environment_columns(config, environments.columns, train)
        evaluated = check_environment_columns(config, environments.columns, evaluated, evaluation=True)
    prompts = build_train_prompts(config, tokenizer, context, offered, train)
    held_out = build_eval_prompts(config, tokenizer, context, offered, evaluated)
    probe: RunProbe | RunBert | None = None
    if config.rollout.trains_bert:
        probe = RunBert(config.rollout.num_prefix_tokens, seed=config.run.seed)
    elif config.rollout.probes:
        probe = RunProbe(last_hidden_size(architecture), max_new_tokens=config.rollout.max_new_tokens)
    start = Start(
        prompts=prompts,
        eval_prompts=held_out,
        tokenizer=tokenizer,
        total_steps=config.run.steps or prompts.steps_for_epochs(config.run.epochs),
        checkpoint=checkpoint,
        warnings=[*damages, *left_out],
        probe=probe,
        lock=lock,
        openings=Openings(config, tokenizer, environments),
    )
    config.check_warmup(start.total_steps)
    if checkpoint is not None:
        _go_on_from(checkpoint, start, run_dir)
    start.plan, idle, unplanned = plan_at_start(config, len(tokenizer), total_steps=start.total_steps)
    num_rows = {name: len(rows) for name, rows in prompts.sources.items()}
    steps = {"total_steps": start.total_steps, "step": start.step}
    start.table = [*derived_table(config, architecture, num_rows=num_rows, **steps), ("trained", trained)]
    start.table += [("KV memory", idle)] if idle else []
    start.warnings += [
        *_folder_warnings(config, run_dir, start),
        *_data_warnings(prompts),
        *_unused_rewards(config, environments),
        *([unplanned] if unplanned else []),
        *setting_warnings(config),
        *context_warnings(architecture, context),
        *sampling_warnings(config, tokenizer, load_generation_config(config.model, architecture)),
    ]
    return start


def _go_on_from(checkpoint: Path, start: Start, run_dir: Path) -> None:
    """Take step, data position, expected lengths and length probe from a checkpoint."""
    state = checkpoints.read_state(checkpoint)
    start.step, start.expected_lengths = state["step"], state.get("expected_lengths")
    if start.step > start.total_steps:
        raise ValueError(
            f"{checkpoint} is after step {start.step}, this run has {start.total_steps}: raise run.steps or "
            "run.epochs, or give another run.dir"
        )
    if start.step == start.total_steps:
        start.warnings.append(
            f"run.dir={run_dir} has all of its {start.total_steps} steps: nothing is left to train; raise run.steps "
            "or run.epochs to go on"
        )
    start.prompts.restore(state["data"])
    missing = start.probe.load(checkpoint) if start.probe is not None else None
    start.warnings += [missing] if missing else []


def open_run_folder(run_dir: Path, start: Start) -> None:
    """Make the run folder, lock it, and write the plan of its memory. ValueError if it cannot be had."""
    start.lock = start.lock or checkpoints.lock_run_folder(run_dir)
    if start.plan is not None:
        write_atomically(run_dir / FILE, start.plan)


def claim_run_folder(config: Config, run_dir: Path, step: int) -> None:
    """The workers have started, after `step`: from here on the folder is this start's. Before, it holds what the start
    before it left."""
    checkpoints.set_aside_after(run_dir, step)
    write_atomically(run_dir / "config.yaml", yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))
    write_versions(run_dir)


def _folder_warnings(config: Config, run_dir: Path, start: Start) -> list[str]:
    """What a start changes of what is in the run folder: steps that are done again, settings."""
    again = checkpoints.folders_after(run_dir / "checkpoints", start.step)
    changed = [] if start.checkpoint is None else _changed_settings(config, run_dir / "config.yaml")
    return [
        *(f"{path} is of a step that is done again: it goes to {path.parent / 'superseded'}" for path in again),
        *(f"changed since this run began: {change}" for change in changed),
    ]


def _data_warnings(prompts: PromptStream) -> list[str]:
    total, per_step = sum(prompts.weights), prompts.prompts_per_step
    return [
        f"data.prompts_per_step={per_step} is above the {len(rows)} rows of data.source"
        f"{f', of {name} with its weight {weight:g} of {total:g}' if name else ''}: a step has some of them more than "
        "once"
        for (name, rows), weight in zip(prompts.sources.items(), prompts.weights, strict=True)
        if per_step * weight > len(rows) * total
    ]


def _changed_settings(config: Config, kept: Path) -> list[str]:
    """What changed against the settings that a resumed run began with. The file is compared with, nothing else."""
    if not kept.is_file():
        return []
    try:
        before = yaml.safe_load(kept.read_text())
    except (yaml.YAMLError, UnicodeDecodeError):
        before = None
    if not isinstance(before, dict) or not all(isinstance(values, dict) for values in before.values()):
        return [f"{kept} is damaged: what changed is not known"]
    return [
        f"{section}.{key}: {before.get(section, {}).get(key)} -> {value}"
        for section, values in dataclasses.asdict(config).items()
        for key, value in values.items()
        if before.get(section, {}).get(key) != value and (section, key) not in (("run", "dir"), ("run", "resume"))
    ]


def _check_surroundings(config: Config) -> None:
    """What can be said without the model: packages and this machine."""
    choose_transport(config)
    check_optimizer(config.learner.optimizer)
    check_trackers(config)
    check_reward_environment(config)
    check_rollout_interpreter(config)
    if config.cluster.address is None:
        _check_this_machine(config)


def _check_this_machine(config: Config) -> None:
    """ValueError when a local cluster has too few GPUs or folders are no place for files; CPUs are reservations there,
    as many as are asked for."""
    cpus, gpus = max(os.cpu_count() or 1, total_cpus(config)), torch.cuda.device_count()
    problem = refusal(config, [Node(name="this machine", cpus=cpus, gpus=gpus, all_cpus=cpus, all_gpus=gpus)])
    if problem:
        raise ValueError(problem)
    if config.rollout.park_folder is not None:
        check_disk_folder("rollout.preemption", config.rollout.park_folder)


def check_turns(
    config: Config, tokenizer: PreTrainedTokenizerBase, architecture: PretrainedConfig, host: EnvironmentHost | None
) -> Tools:
    """The tools that prompts offer. ValueError for a chat template that cannot go on with a trajectory."""
    if host is None:
        return NO_TOOLS
    if config.rollout.stop_strings:
        raise ValueError("rollout.stop_strings must be empty with an environment, whose turns end with a stop token")
    if config.objective.turn_credit == "turn" and host.form != "actions":
        raise ValueError(
            "objective.turn_credit=turn needs an environment whose step() rewards a turn; "
            f"{config.environment.factory} has tools, and one reward at its end"
        )
    if not host.rewards and any(function.name == ENVIRONMENT for function in config.reward.functions):
        raise ValueError(
            f"environment.factory={config.environment.factory} has no get_reward, which reward.functions names as "
            "environment: name a function in its place"
        )
    stops = stop_ids_of(load_generation_config(config.model, architecture), tokenizer, config.rollout.stop_token_ids)
    for data in config.data.parts.values():
        templates_of(tokenizer, data.chat_template_kwargs, host.tools, stops)
    return host.tools


def _unused_rewards(config: Config, host: EnvironmentHost | None) -> list[str]:
    """What an environment gives is a reward where reward.functions names it, and else is left out."""
    if host is None or not host.rewards or any(function.name == ENVIRONMENT for function in config.reward.functions):
        return []
    return [
        f"environment.factory={config.environment.factory} gives rewards, which reward.functions leaves out; name "
        "environment there to add them, as TRL does"
    ]


def _check_tokens(config: Config, tokenizer: PreTrainedTokenizerBase, architecture: PretrainedConfig) -> None:
    """ValueError for ids that the tokenizer or the model has not, and for stop strings that can never be found."""
    if len(tokenizer) > architecture.vocab_size:
        raise ValueError(
            f"the tokenizer of model.path={config.model.path} has {len(tokenizer)} ids, the model only "
            f"{architecture.vocab_size}"
        )
    outside = [token for token in config.rollout.stop_token_ids if not 0 <= token < len(tokenizer)]
    if outside:
        raise ValueError(
            f"rollout.stop_token_ids must be ids of the tokenizer, 0 to {len(tokenizer) - 1}, got {outside}"
        )
    masked_index(config.rollout.bad_token_ids, len(tokenizer), "cpu")
    StopStrings(tokenizer, config.rollout.stop_strings)
