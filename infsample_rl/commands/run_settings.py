"""The checkpoint a command is given, and the settings it was trained with: RUN/config.yaml composed again with changes
on top."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import yaml

from infsample_rl.config import Config
from infsample_rl.config.loading import load_config
from infsample_rl.config.overrides import ConfigError
from infsample_rl.config.removed import without_removed
from infsample_rl.controller.checkpoints import checkpoints

SAMPLING_ALONE = (
    "model.tokenizer_path=null",
    "model.chat_template=null",
    "rollout.micro_group_size=null",
    "rollout.schedule=token_budget",
    "rollout.predictor=none",
    "rollout.prefix_tokens=null",
    "objective.advantage=mean_only",
    "run.max_staleness=0",
    # nothing is trained, so that no row has to hold what is sampled
    *(f"{row}.max_tokens_per_micro_batch={2**30}" for row in ("learner", "reference")),
)
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def leading(arguments: list[str], what: str, usage: str, count: int = 1) -> list[str]:
    """The first `count` arguments: paths, in which an = may be, or hub names. ValueError where one is a setting, or is
    not there."""
    given = arguments[:count]
    if len(given) < count or any("=" in each.partition("/")[0] and not os.path.exists(each) for each in given):
        raise ValueError(f"give {what} first: python -m infsample_rl {usage}")
    return given


def checkpoint_folder(checkpoint: str) -> Path | None:
    """The folder CHECKPOINT is, or None for a hub name. ValueError, with the checkpoints there are, for a run folder
    and for no folder."""
    folder = Path(checkpoint).expanduser()
    if folder.is_file():
        raise ValueError(f"CHECKPOINT={checkpoint} is a file; give the folder it is in")
    if is_run_folder(folder):
        raise ValueError(f"CHECKPOINT={checkpoint} is a run folder; give a checkpoint of it: {_kept(folder)}")
    if folder.is_dir() and checkpoint:
        return folder
    if folder.parent.name == "checkpoints":
        raise ValueError(
            f"CHECKPOINT={checkpoint}: there is no such folder; the run has kept: {_kept(folder.parent.parent)}"
        )
    if not HUB_NAME.fullmatch(checkpoint):
        raise ValueError(f"CHECKPOINT={checkpoint}: there is no such folder, and a hub name is owner/name")
    return None


def is_run_folder(folder: Path) -> bool:
    """Whether a run has begun in it."""
    return (folder / "config.yaml").is_file() and not (folder / "config.json").is_file()


def _kept(run_dir: Path) -> str:
    return ", ".join(map(str, checkpoints(run_dir))) or "none"


def run_of(checkpoint: Path) -> Path | None:
    """The run folder of RUN/checkpoints/step_N, or superseded/step_N there; None for a folder that lies elsewhere."""
    for path in (checkpoint.absolute(), checkpoint.resolve()):  # a link may lie elsewhere
        folder = path.parent.parent if path.parent.name == "superseded" else path.parent
        if folder.name == "checkpoints" and (folder.parent / "config.yaml").is_file():
            return folder.parent
    return None


def model_and_run(checkpoint: str) -> tuple[list[str], Path | None]:
    """Settings that sample from CHECKPOINT alone, without what only training reads, and its run's folder, if it has
    one."""
    folder = checkpoint_folder(checkpoint)
    ours = [f"model.path={quoted(checkpoint if folder is None else str(folder.absolute()))}", *SAMPLING_ALONE]
    return ours, None if folder is None else run_of(folder)


def answering_config(checkpoint: str, overrides: list[str], *, rows: int, max_new_tokens: int) -> Config:
    """Settings of CHECKPOINT's run for answers outside of one: a pool of `rows` responses of so many tokens, whatever
    the run had. ValueError in one line."""
    ours, run_dir = model_and_run(checkpoint)
    prompts = 1 if rows == 1 else "auto"  # of which the pool holds several
    ours += [f"rollout.group_size={rows}", f"rollout.slots={rows}", f"rollout.prompts_at_once={prompts}"]
    ours += ["rollout.kv_budget_tokens=null", "rollout.kv_budget_bytes=null", "rollout.micro_group_size=1"]
    ours += [f"rollout.max_new_tokens={max_new_tokens}", "objective.overlong_buffer_tokens=0"]
    ours += ["rollout.engine=native", "rollout.tensor_parallel=1"]  # whatever sampled in the run
    if run_dir is None:
        ours += ["data.source=none.jsonl", "reward.functions=[{name: math}]"]  # nothing reads them
    config = load_run_config(run_dir, [*ours, *overrides])
    if config.rollout.engine != "native":
        raise ValueError(
            f"rollout.engine={config.rollout.engine} must be native to talk to a checkpoint; vLLM answers by its own "
            f"`vllm serve {checkpoint}`"
        )
    return config


def load_run_config(run_dir: Path | None, overrides: list[str]) -> Config:
    """A run's settings with `overrides` on top; without a run the defaults. ConfigError in one line for what cannot
    be."""
    kept = "" if run_dir is None else _read(run_dir / "config.yaml")
    with tempfile.TemporaryDirectory() as folder:
        experiment = Path(folder) / "experiment" / "run.yaml"
        experiment.parent.mkdir()
        experiment.write_text(f"# @package _global_\n{kept}", encoding="utf-8")
        try:
            return load_config(["+experiment=run", *overrides], folder)
        except ConfigError as error:
            if run_dir is None:
                raise
            written = rf"\S*{Path(folder).name}/experiment/run\.yaml"  # relative to the current folder, where below it
            raise ConfigError(re.sub(written, lambda _: f"{run_dir}/config.yaml", str(error))) from None


def _read(path: Path) -> str:
    """A run's settings as YAML, without those of an earlier version that are gone. ValueError, with the file's name,
    for what is none, and for one that is gone and was set."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        kept = without_removed(settings) if isinstance(settings, dict) else settings
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", yaml.safe_dump(kept, sort_keys=False, allow_unicode=True))


def quoted(text: str) -> str:
    """A value as Hydra takes it, whatever is in it: a backslash means itself but before a quote, the end or an
    interpolation."""
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text) + "'"
