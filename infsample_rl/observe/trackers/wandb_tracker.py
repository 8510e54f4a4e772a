"""W&B: metrics over `step`, samples as a table; offline without a key or a server."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from pathlib import Path
from typing import Any

from requests.utils import get_netrc_auth

from infsample_rl.config import Config
from infsample_rl.observe.metric_names import GROUPS

# of the public server, the older name and the one since 0.31
PUBLIC_SERVERS = ("https://api.wandb.ai", "https://api.forge.coreweave.com")
INIT_TIMEOUT_S = 20.0  # longest wait for the W&B server at start; the variable WANDB_INIT_TIMEOUT overrides it
LONGEST_PROJECT, NOT_IN_PROJECT = 128, "/\\#?%:"  # W&B's own bounds of a project's name
FINISH_TIMEOUT_S = 120.0  # longest wait for the last uploads
COMPLETION_COLUMNS = [
    "step", "prompt_index", "sample_index", "prompt", "response", "reward", "components", "advantage", "length",
    "finish_reason", "policy_version",
]  # fmt: skip


def wandb_mode(choice: str) -> str:
    """online, offline or disabled, for logging.wandb; auto follows WANDB_MODE, else is online with a key and offline
    without.

    Raises ValueError for online without a key: W&B would stop and ask for one.
    """
    if choice == "auto":
        choice = os.environ.get("WANDB_MODE") or ("online" if has_wandb_key() else "offline")
        if choice not in ("online", "offline", "disabled"):
            raise ValueError(f"WANDB_MODE must be one of online, offline, disabled, got {choice!r}")
    if choice == "online" and not has_wandb_key():
        raise ValueError(
            "logging.wandb=online needs a key: set WANDB_API_KEY, run `wandb login`, or use logging.wandb=offline"
        )
    return choice


def has_wandb_key() -> bool:
    """Whether WANDB_API_KEY or the netrc file has a key for the W&B server (WANDB_BASE_URL)."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    own = os.environ.get("WANDB_BASE_URL")
    return any(filter(None, map(get_netrc_auth, [own] if own else PUBLIC_SERVERS)))


def check_project(name: str) -> None:
    """ValueError for a project that W&B would refuse once everything has started."""
    if len(name) > LONGEST_PROJECT or set(name) & set(NOT_IN_PROJECT):
        raise ValueError(
            f"logging.wandb_project must be up to {LONGEST_PROJECT} characters without any of {NOT_IN_PROJECT}, got "
            f"{name!r}; for a team set WANDB_ENTITY"
        )


class WandbTracker:
    """A W&B run, with its files in run_dir/wandb, its id in run_dir/wandb_id, and nothing of its own on the console."""

    name = "W&B"

    def __init__(self, config: Config, run_dir: Path, mode: str, kept_id: str | None) -> None:
        run_id = kept_id or secrets.token_hex(4)
        (run_dir / "wandb_id").write_text(run_id + "\n", encoding="utf-8")
        self._run, reason = start_wandb(config, run_dir, mode, run_id)
        self.said = [f"W&B goes offline, in {run_dir / 'wandb'}: {reason}"] if reason else []
        self.place = f"W&B: {self._run.url}" if self._run.url else ""  # offline: the start table has it

    def log(self, step: int, values: dict[str, float], samples: list[dict[str, Any]]) -> None:
        table = {"completions": wandb_table(samples)} if samples else {}
        self._run.log({"step": step, **values, **table})

    def rewind(self, step: int) -> None:
        """Rows cannot be taken back: those of a step that is done again follow the first ones."""

    def close(self, *, failed: bool) -> None:
        try:
            self._run.finish(exit_code=1 if failed else 0)
        except TimeoutError:
            self.said.append(
                f"W&B did not take all data within {FINISH_TIMEOUT_S:.0f} s; to send the rest: wandb sync "
                f"{self._run.settings.sync_dir}"
            )


def start_wandb(config: Config, run_dir: Path, mode: str, run_id: str) -> tuple[Any, str]:
    """Start a W&B run, silent, online with a bounded wait for the server, or offline. Returns it and, when online did
    not work and it went offline, the reason (else ""). ValueError where offline does not work either."""
    import wandb

    def init(mode: Any) -> Any:
        wandb.setup(wandb.Settings(silent=True))  # the login message comes before the settings of init apply
        settings = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT") or INIT_TIMEOUT_S),
            finish_timeout=FINISH_TIMEOUT_S,
            finish_timeout_raises=True,
        )
        place: dict[str, Any] = {"project": config.logging.wandb_project, "name": config.run.name, "dir": run_dir}
        known: dict[str, Any] = {"id": run_id, "resume": "allow", "config": dataclasses.asdict(config)}
        return wandb.init(mode=mode, settings=settings, **place, **known)

    reason = ""
    for each in dict.fromkeys((mode, "offline")):
        try:
            run = init(each)
            break
        except wandb.errors.Error as error:
            reason = str(error).splitlines()[0]
            wandb.teardown()  # the failed run still holds the id
    else:
        raise ValueError(f"logging.wandb={mode} cannot be used: {reason}; logging.wandb=disabled does without W&B")
    # The step is a value like any other: after a resume, rows given as step= that are older than the last one are
    # dropped.
    run.define_metric("step", hidden=True)
    for name in (*(f"{group}/*" for group in GROUPS), "completions"):
        run.define_metric(name, step_metric="step")
    run.define_metric("eval/accuracy", step_metric="step", summary="max,last")
    return run, reason


def wandb_table(samples: list[dict[str, Any]]) -> Any:
    """A W&B table of samples with their rewards, one row each."""
    import wandb

    rows = [{**sample, "components": json.dumps(sample["components"])} for sample in samples]
    return wandb.Table(
        columns=list[str | int](COMPLETION_COLUMNS),
        data=[[row[column] for column in COMPLETION_COLUMNS] for row in rows],
    )
