"""The whole plan of a run, as it is shown and as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infsample_rl.config import Config
from infsample_rl.plan.advice import advise
from infsample_rl.plan.decode_time import DecodeTime, decode_time
from infsample_rl.plan.devices import Device, gigabytes, host
from infsample_rl.plan.limits import idle_memory, largest_group, largest_pool, largest_row
from infsample_rl.plan.model_outline import ModelOutline
from infsample_rl.plan.processes import ProcessPlan, device_of, plan_processes
from infsample_rl.plan.rollout_memory import parked_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RolePlan:
    """One role: what it holds, where, the largest settings that fit there, and what to change where it does not."""

    process: ProcessPlan
    device: Device
    largest: dict[str, int | None]
    limits: list[str]
    advice: list[str]

    @property
    def fits(self) -> bool:
        """Whether the sum is no more than the device has for it."""
        return self.process.sum_bytes <= self.device.usable_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """All roles, and how long sampling takes."""

    model: str
    dtype: str
    parameters: int
    roles: list[RolePlan]
    decode: DecodeTime
    host_bytes: int  # of all processes that compute on the CPU
    host_room: int

    @property
    def fits(self) -> bool:
        """Whether everything does, processes on this machine's CPU together."""
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
        names = ("model", "dtype", "parameters", "fits", "host_bytes", "host_room")
        return {name: getattr(self, name) for name in names} | {"processes": processes, "decode": decode}


def plan_run(config: Config, lengths: Path | None = None) -> RunPlan:
    """Plan a run of these settings. ValueError, in one line, for a model, a file or a device that is not to be had."""
    model = ModelOutline.of(config)
    roles = [_plan_role(config, model, process) for process in plan_processes(config, model)]
    sampling = device_of(config, "learner" if config.cluster.colocate else "rollout")
    return RunPlan(
        model=config.model.path,
        dtype=config.model.dtype,
        parameters=model.num_parameters,
        roles=roles,
        decode=decode_time(config, model, sampling, lengths),
        host_bytes=sum(role.process.count * role.process.sum_bytes for role in roles if role.process.gpus == 0),
        host_room=host().memory_bytes,
    )


def _plan_role(config: Config, model: ModelOutline, process: ProcessPlan) -> RolePlan:
    device = device_of(config, "learner" if process.role == "colocated" else process.role)
    largest: dict[str, int | None] = {}
    limits: list[str] = []
    if process.role in ("rollout", "colocated"):
        pool = largest_pool(config, model, process, device)
        group = largest_group(config, pool)
        largest |= pool | {"group_size": group}
        most = "any" if group is None else f"at most {group:,}"
        limits.append(f"at most {pool['pages']:,} pages = {pool['slots']:,} slots, {pool['rows']:,} rows; G {most}")
        if config.rollout.schedule == "token_budget" and config.rollout.preemption != "recompute":
            limits.append(
                f"of each up to {gigabytes(parked_bytes(config, model, device))} of preempted KV {_parked_in(config)}"
            )
        limits += [idle] if (idle := idle_memory(config, model, process, pool)) else []
    if process.role in ("learner", "colocated"):
        row = largest_row(config, model, device)
        largest["max_tokens_per_micro_batch"] = row
        limits.append("no row fits" if row is None else f"learner.max_tokens_per_micro_batch at most {row:,}")
    fits = process.sum_bytes <= device.usable_bytes
    return RolePlan(
        process=process,
        device=device,
        largest=largest,
        limits=limits,
        advice=[] if fits else advise(config, model, process, device),
    )


def _parked_in(config: Config) -> str:
    if config.rollout.park_folder is not None:
        return f"on the disk, in {config.rollout.park_folder}"
    return "in host memory" if config.cluster.rollout_gpus > 0 else "on the disk of the temporary folder"
