"""The whole plan of a run, as it is shown and as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from infsample_rl.config import Config
from infsample_rl.plan.advice import advise
from infsample_rl.plan.decode_time import DecodeTime, decode_time
from infsample_rl.plan.devices import Device, gigabytes, host
from infsample_rl.plan.learner_memory import resting_bytes
from infsample_rl.plan.limits import idle_memory, largest_pool, largest_row
from infsample_rl.plan.model_outline import ModelOutline
from infsample_rl.plan.processes import ProcessPlan, is_here, place_of, plan_processes, sampling_place
from infsample_rl.plan.rollout_memory import parked_bytes

SAMPLE_TOKEN_BYTES = 16  # id, log-probability, that of a truncated distribution, the reference's: 4 each
LIKELY_TOKEN_BYTES = 8  # of a teacher: id and log-probability


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """One role: what it holds and where. What is largest there and what to change is worked out when it is asked for,
    since that plans the role many times."""

    config: Config
    model: ModelOutline
    process: ProcessPlan
    device: Device

    @property
    def fits(self) -> bool:
        """Whether the sum is no more than the device has for it."""
        return self.process.sum_bytes <= self.device.usable_bytes

    @cached_property
    def largest_pool(self) -> dict[str, int]:
        """Of a role that samples: pages, slots and rows that fit. Empty of any other."""
        if self.process.role not in ("rollout", "colocated"):
            return {}
        return largest_pool(self.config, self.model, self.process, self.device)

    @cached_property
    def largest(self) -> dict[str, int | None]:
        """The largest settings that fit, by name; None: any, and of rows that none does."""
        largest: dict[str, int | None] = dict(self.largest_pool)
        if self.largest_pool:
            # no schedule but full_group holds more for a larger one
            largest["group_size"] = largest["slots"] if self.config.rollout.schedule == "full_group" else None
        if self.process.role in ("learner", "colocated"):
            largest["max_tokens_per_micro_batch"] = largest_row(self.config, self.model, self.device)
        return largest

    @cached_property
    def advice(self) -> list[str]:
        """What to change where the role does not fit."""
        return [] if self.fits else advise(self.config, self.model, self.process, self.device)

    @property
    def limits(self) -> list[str]:
        """`largest` in words, and KV memory that lies idle."""
        limits: list[str] = []
        rollout, largest = self.config.rollout, self.largest
        if pool := self.largest_pool:
            most = "any" if largest["group_size"] is None else f"at most {largest['group_size']:,}"
            limits.append(f"at most {pool['pages']:,} pages = {pool['slots']:,} slots, {pool['rows']:,} rows; G {most}")
            if rollout.parks:
                place = sampling_place(self.config, self.model)
                parked = gigabytes(parked_bytes(self.config, self.model, place))
                limits.append(f"of each up to {parked} of preempted KV {_parked_in(self.config)}")
            idle = idle_memory(self.config, self.model, self.process, pool)
            limits += [idle] if idle else []
        if "max_tokens_per_micro_batch" in largest:
            row = largest["max_tokens_per_micro_batch"]
            limits.append("no row fits" if row is None else f"learner.max_tokens_per_micro_batch at most {row:,}")
        return limits


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """All roles, and how long sampling takes."""

    model: str
    dtype: str
    parameters: int
    roles: list[RolePlan]
    decode: DecodeTime
    host_bytes: int  # of all processes in host memory, as far as their machine is known
    unchecked_bytes: int  # of those whose machine is not, beside its GPUs
    host_room: int
    waiting_bytes: int  # of finished samples that wait for the learner in Ray's object store, at most

    @property
    def fits(self) -> bool:
        """Whether everything does, in this machine's memory all processes together."""
        return all(role.fits for role in self.roles) and self.host_bytes <= self.host_room

    def record(self) -> dict[str, Any]:
        """One JSON object; `processes` as in plan.json."""
        processes = [
            role.process.record()
            | {"device": role.device.name, "usable_bytes": role.device.usable_bytes, "fits": role.fits}
            | {"largest": role.largest, "advice": role.advice}
            for role in self.roles
        ]
        decode = dataclasses.asdict(self.decode) | {"seconds": self.decode.seconds}
        names = ("model", "dtype", "parameters", "fits", "host_bytes", "unchecked_bytes", "host_room", "waiting_bytes")
        return {name: getattr(self, name) for name in names} | {"processes": processes, "decode": decode}


def plan_run(config: Config, lengths: Path | None = None) -> RunPlan:
    """Plan a run of these settings. ValueError, in one line, for a model, a file or a device that is not to be had."""
    model = ModelOutline.of(config)
    roles = [
        RolePlan(
            config=config,
            model=model,
            process=process,
            device=place_of(config, model, process.role),
        )
        for process in plan_processes(config, model)
    ]
    processes, known = [role.process for role in roles], is_here(config)
    host_bytes = {each.role: each.count * each.host_bytes for each in processes if known or each.gpus == 0}
    unchecked = [each.count * each.host_bytes for each in processes if each.role not in host_bytes]
    if config.takes_turns and config.cluster.learner_gpus == 0:  # the fuller turn
        resting = config.cluster.learner_ranks * resting_bytes(config, model)
        host_bytes["learner"] = max(host_bytes["learner"] - host_bytes["rollout"], resting)
    return RunPlan(
        model=config.model.path,
        dtype=config.model.dtype,
        parameters=model.num_parameters,
        roles=roles,
        decode=decode_time(config, model, sampling_place(config, model), lengths),
        host_bytes=sum(host_bytes.values()),
        unchecked_bytes=sum(unchecked),
        host_room=host().memory_bytes,
        waiting_bytes=(SAMPLE_TOKEN_BYTES + LIKELY_TOKEN_BYTES * config.objective.teacher_top_k)
        * (config.samples_per_step * config.rollout.max_new_tokens),
    )


def _parked_in(config: Config) -> str:
    if config.rollout.park_folder is not None:
        return f"on the disk, in {config.rollout.park_folder}"
    return "in host memory" if config.cluster.rollout_gpus > 0 else "on the disk of the temporary folder"
