"""One conversion: a peer's table is walked row by row, and what no row and no code has read is dropped, and said."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from infsample_rl.commands.convert.values import NoEquivalent, count_rows, not_negative, positive
from infsample_rl.config import fields
from infsample_rl.config.overrides import SECTIONS

SECRET = re.compile(
    r"(wandb\.key|use_wandb|token|(api|access|private)[_-]key|secret([_-]key)?|password|credentials?)$", re.I
)
SCHEDULES = {name: name for name in ("constant", "linear", "cosine")}  # of transformers
SCHEDULES |= {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
NUMBERS = (int, float, positive, not_negative)
NO_CRITIC = "there is no critic: a baseline is the group's own"
NO_DROPOUT, STEADY_KL = "adapters have no dropout", "the weight of a KL stays as it is"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a peer's table: their name, ours ("": there is none), a function of the value (None: nothing to set),
    the value their trainer takes where none is given, and the settings of theirs, or NAME=VALUE, without which this one
    does nothing.

    Examples: Row("lora_r", "learner.lora_rank", int, 16, when="use_peft")
    Row("lora_bias", "", only("none", why="biases are not trained"), when="use_peft")
    """

    theirs: str
    ours: str
    convert: Callable[[Any], Any] = lambda value: value
    default: Any = None
    when: str = ""


class Conversion:
    """Their settings on the way to ours: `settings` of (value, origin), `dropped`, and names `without_effect` on what
    is learnt, found by patterns. The rows are applied at once; the rest is code of the peer."""

    def __init__(self, given: Mapping[str, Any], peer: str, rows: Sequence[Row], without_effect: str):
        self.peer, self._patterns = peer, without_effect.split()  # peer: with its version
        self.given = {name: value for name, value in given.items() if value != ""}
        self.settings: dict[str, tuple[Any, str]] = {}
        self.dropped = [f"{name}= is empty" for name, value in given.items() if value == ""]
        self.without_effect: set[str] = set()
        self._defaults = {row.theirs: row.default for row in rows if row.default is not None}
        self._read: set[str] = set()
        self._idle: set[str] = set()  # rows that do nothing
        for row in rows:
            if not all(map(self._is_on, row.when.split())):
                self._idle.add(row.theirs)
                continue
            if self.value(row.theirs) is None:
                continue
            try:
                value = self.value(row.theirs, row.convert)
            except NoEquivalent as error:
                self.drop(row.theirs, str(error))
            else:
                if value is not None:
                    self.set(row.ours, value, f"{row.theirs} {row.when}")

    def _is_on(self, condition: str) -> bool:
        name, _, value = condition.partition("=")
        found = self.given.get(name, self._defaults.get(name))
        is_on = str(found) == value if value else not _is_no(found)
        if name in self.given and not is_on:  # one that is on is read where something is made of it
            self._read.add(name)
        return is_on

    def value(self, name: str, kind: Callable[[Any], Any] = lambda value: value, default: Any = None) -> Any:
        """kind(their value, or else their default). ValueError in one line for a value theirs would not take."""
        self._read.add(name)
        found = self.given.get(name, self._defaults.setdefault(name, default))
        try:
            if isinstance(found, bool) and kind in NUMBERS:  # a flag without its value
                raise ValueError(found)
            return kind(found)
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError):
            raise ValueError(f"{self._spelled(name)} is not a value that {self.peer} takes") from None

    def is_off(self, name: str) -> bool:
        """Whether a setting of theirs is none, false, no or 0."""
        return _is_no(self.value(name))

    def set(self, ours: str, value: Any, theirs: str = "", why: str = "") -> None:
        """Set one of ours, made of `theirs`, names with spaces between; not our default where none is given."""
        self._read.update(theirs.split())
        names = [name for name in dict.fromkeys(theirs.split()) if name in self.given]
        if names or why or value != default_of(ours):
            origin = ", ".join(map(self._spelled, names)) or ("" if why else f"as in {self.peer}")
            self.settings[ours] = value, "; ".join(filter(None, (origin, why)))

    def ours(self, name: str) -> Any:
        """What one of ours was set to; its default otherwise."""
        return self.settings[name][0] if name in self.settings else default_of(name)

    def drop(self, name: str, why: str) -> None:
        """Say that a setting of theirs has no equivalent here, and why or what to use instead."""
        self._read.add(name)
        self.dropped.append(f"{self._spelled(name)}: {why}")

    def set_sources(self, files: list[str], theirs: str, held_out: list[str], theirs_held_out: str) -> None:
        """data.source and data.eval_source, or for several files data.sources, in which every row counts alike."""
        beside = held_out[len(files) or 1 :]
        if len(files) <= 1:
            self.set("data.source", files[0] if files else None, theirs)
            self.set("data.eval_source", held_out[0] if held_out else None, theirs_held_out)
        else:
            rows = [count_rows(file) for file in files]
            if None in rows:
                self.drop(theirs, "its rows could not be counted: every source has the same weight in data.sources")
            tests = [*held_out, *[None] * len(files)]
            self.set(
                "data.sources",
                [
                    {"source": file, "weight": count if None not in rows else 1, "eval_source": test}
                    for file, count, test in zip(files, rows, tests, strict=False)
                ],
                f"{theirs} {theirs_held_out}",
            )
        if beside:
            self.drop(theirs_held_out, f"{', '.join(beside)} beside the others; join them into one file")

    def set_lengths(self, prompt: int, new: int, theirs: str) -> None:
        """The longest prompt and response, and learner and reference rows that hold both."""
        self.set("data.max_prompt_tokens", prompt, theirs)
        self.set("rollout.max_new_tokens", new, theirs)
        for ours in ("learner.max_tokens_per_micro_batch", "reference.max_tokens_per_micro_batch"):
            self.set(ours, max(default_of(ours), prompt + new))

    def set_warmup(self, name: str, unit: float = 1, default: float = 0.0) -> None:
        """learner.warmup_steps: theirs in `unit` updates, or below 1 a share of the run's; told where it has epochs."""
        warmup = self.value(name, lambda value: float(value or 0), default)
        if warmup >= 1:
            self.set("learner.warmup_steps", math.ceil(int(warmup) * unit), name, "in updates")
        elif warmup > 0 and "run.steps" in self.settings:
            updates = self.ours("run.steps") * self.ours("objective.epochs") * self.ours("objective.mini_batches")
            self.set("learner.warmup_steps", math.ceil(warmup * updates), name)
        elif warmup > 0:
            self.drop(name, f"set learner.warmup_steps, {warmup:g} times the updates of the run")

    def place(self, learner: int, theirs: str, rollout: int = 0) -> None:
        """One GPU for each; without rollout workers, sampling and training are in one process. The reference of a KL in
        the reward has one of these GPUs, or a quarter of the only one; that of a KL in the loss is by the policy."""
        in_reward, gpus = self.ours("objective.kl_reward_coef") > 0, {"rollout": 1.0, "learner": 1.0}
        if not rollout:
            self.set("cluster.colocate", True, theirs, "sampling and training on the same GPUs")
            gpus = dict.fromkeys(gpus, 0.75) if in_reward and learner == 1 else gpus
            learner = rollout = max(1, learner - in_reward)
        self.set("cluster.rollout_workers", rollout, theirs)
        self.set("cluster.learner_ranks", learner, theirs)
        if in_reward:
            gpus["reference"] = 0.25 if gpus["learner"] < 1 else 1.0
        elif self.ours("objective.kl_coef") > 0:
            self.set("reference.placement", "learner", theirs, "beside the policy")
        for role, share in gpus.items():
            self.set(f"cluster.{role}_gpus", share, theirs)
        if any(function["name"].startswith("model:") for function in self.ours("reward.functions")):
            self.set("cluster.reward_gpus", 1, why="0 runs the reward model on the CPU")
        self.set("rollout.kv_budget_bytes", "auto", why="the KV pool takes what memory is left")

    def finish(self, loggers: Sequence[str], theirs: str) -> Conversion:
        """Set where metrics go, list what is not read yet. ValueError when one of ours that must be was not found."""
        self.set("logging.wandb", "auto" if {"wandb", "all"} & set(loggers) else "disabled", theirs)
        self.set("logging.tensorboard", bool({"tensorboard", "all"} & set(loggers)), theirs)
        left = {name for name in self.given.keys() - self._read if self.given[name] is not None}
        self.without_effect = {name for name in left if name in self._idle or self.has_no_effect(name)}
        self.dropped += map(self._spelled, left - self.without_effect)
        source = "data.sources" if "data.sources" in self.settings else "data.source"
        for ours in ("model.path", source, "reward.functions"):
            if self.ours(ours) in (None, []) or ours not in self.settings:
                left_out = f" (not converted: {'; '.join(self.dropped)})" if self.dropped else ""
                raise ValueError(
                    f"nothing says what {ours} is to be; add it behind FILE, as one would for {self.peer}{left_out}"
                )
        return self

    def has_no_effect(self, name: str) -> bool:
        """Whether a pattern says that a name of theirs changes nothing that is learnt."""
        return any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def _spelled(self, name: str) -> str:
        value = " ".join(str(self.given.get(name, self._defaults.get(name))).split())
        shown = "(not shown)" if SECRET.search(name) else value if len(value) <= 80 else value[:77] + "..."
        return f"{name}={shown}" + ("" if name in self.given else f", the default of {self.peer}")

    def yaml(self, made_by: str, name: str) -> str:
        """The text of configs/experiment/NAME.yaml: a comment behind every setting says where it comes from."""
        run = f"python -m infsample_rl.main --config-dir DIR +experiment={name}"
        lines = ["# @package _global_", f"# Made by `{made_by}`. Save it as DIR/experiment/{name}.yaml, then: {run}"]
        for section in SECTIONS:
            inside = {ours: made for ours, made in self.settings.items() if ours.startswith(f"{section}.")}
            lines += ["", f"{section}:"] if inside else []
            for ours, (value, origin) in inside.items():
                lines.append(f"  {ours.partition('.')[2]}: {json.dumps(value, ensure_ascii=False)}  # {origin}")
        lines += ["", *(f"# not converted: {entry}" for entry in sorted(self.dropped))]
        lines.append(f"# change nothing that is learnt: {' '.join(sorted(self.without_effect)) or 'none'}")
        return "\n".join(lines) + "\n"


def _is_no(value: Any) -> bool:
    return str(value).lower() in ("none", "false", "no", "off", "0", "0.0")


def default_of(ours: str) -> Any:
    """Our own default of `section.key`."""
    section, _, key = ours.partition(".")
    return fields.default_of(next(spec for spec in dataclasses.fields(SECTIONS[section]) if spec.name == key))
