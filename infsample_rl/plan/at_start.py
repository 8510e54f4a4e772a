"""What a start says of memory: plan.json in the run folder, and KV memory that lies idle."""

from __future__ import annotations

import json

from infsample_rl.config import Config
from infsample_rl.plan.limits import idle_memory, largest_pool
from infsample_rl.plan.model_outline import ModelOutline
from infsample_rl.plan.processes import place_of, plan_processes

FILE = "plan.json"


def plan_at_start(config: Config, valid_vocab: int, *, total_steps: int) -> tuple[str | None, str | None, str | None]:
    """What plan.json is to hold, for the report; idle_memory()'s line; and a line that says why there is no plan, where
    the model cannot be planned or its device is not known.

    {"total_steps": 9, "processes": [{"role": "learner", "count": 1, "gpus": 0.0, "lines": [{"name": "weights", "bytes":
    4}, ...], "sum_bytes": 4, "host_lines": []}]}
    """
    try:
        model = ModelOutline.of(config, valid_vocab)
        plans = plan_processes(config, model)
        sampling = next(plan for plan in plans if plan.role in ("rollout", "colocated"))
        device = place_of(config, model, sampling.role)
        idle = idle_memory(config, model, sampling, largest_pool(config, model, sampling, device))
    # a model unlike those that are known
    except (ValueError, RuntimeError, AttributeError, KeyError, TypeError, StopIteration) as error:
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else "no reason given"
        return None, None, f"no {FILE}: {type(error).__name__}: {reason}"
    plan = {"total_steps": total_steps, "processes": [plan.record() for plan in plans]}
    return json.dumps(plan, indent=1), idle, None
