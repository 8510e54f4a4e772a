"""When memory runs out: who asked for how much, what the plan said of it, which setting to change. Pure; reads
RUN/plan.json and /proc.

A failure travels as text: a worker's exception, or what Ray says of a process that is gone. `explain` adds to such a
line what helps; lines that are not of memory stay as they are.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from infsample_rl.config import Config
from infsample_rl.config.fields import kv_pages, parse_bytes

OUT_OF_MEMORY = re.compile(
    r"out of memory|(?:can't|cannot) allocate memory|unable to allocate|MemoryError|std::bad_alloc|low on "
    r"memory|OutOfMemory|OUT_OF_MEMORY",
    re.IGNORECASE,
)
SIZE = r"([\d.,]+) ?(bytes|[KMGTPE]i?B)\b"
ASKED = (rf"tried to allocate {SIZE}", rf"unable to allocate {SIZE}")  # torch on both devices; numpy
FREE = rf"of which {SIZE} is free"  # torch on CUDA
WHO = re.compile(r"\b(rollout|reward|reference|learner) (?:worker|rank) (\d+)")
PHASE = re.compile(r"\bin phase (\w+)")
PART_OF_PHASE = {  # where a process does the work of several parts
    "decode": "rollout",
    "prefill": "rollout",
    "forward": "learner",
    "backward": "learner",
    "optimizer": "learner",
    "reference": "reference",
    "reward": "reward",
}
SAID = "ran out of memory"  # in a line that has been explained
LINES_SHOWN = 3  # of the plan, the largest
UNITS = {"bytes": 1} | {
    f"{letter}{i}B": base**power for i, base in (("", 1000), ("i", 1024)) for power, letter in enumerate("KMGTPE", 1)
}


def is_out_of_memory(text: str) -> bool:
    """Whether a failure's text speaks of memory that was not there."""
    return OUT_OF_MEMORY.search(text) is not None


def explain(text: str, config: Config) -> str:
    """A failure's line, and if it is one of memory: what was asked, what plan.json predicted, settings to change, most
    effective first.

    Example: "learner rank 0: CUDA out of memory. Tried to allocate 2.00 GiB ... in phase backward" -> "learner rank 0
    ran out of memory in phase backward: it asked for 2.15 GB, 1.1 GB were free; the plan said 9.9 GB, most of it
    activations 6.1 GB, ...; set ...: <the text>"
    """
    if not is_out_of_memory(text) or SAID in text:
        return text
    who, phase = WHO.search(text), PHASE.search(text)
    role = who[1] if who else None
    part = PART_OF_PHASE.get(phase[1] if phase else "", role)
    asked = next((_bytes(found) for pattern in ASKED if (found := re.search(pattern, text, re.IGNORECASE))), None)
    free = re.search(FREE, text, re.IGNORECASE)
    said = [f"{who[0] if who else 'the driver'} {SAID}" + (f" in phase {phase[1]}" if phase else "")]
    if asked is not None:
        said.append(f"it asked for {size_text(asked)}" + (f", {size_text(_bytes(free))} were free" if free else ""))
    planned = planned_text(Path(config.run.dir or "."), role)
    said += [planned] if planned else []
    settings = advice(config, part, phase[1] if phase else "")
    said += [f"set {', or '.join(settings)}"] if settings else []
    return f"{'; '.join(said)} ({text})"


def _bytes(found: re.Match[str]) -> int:
    """Of a match of SIZE."""
    unit = next(unit for unit in UNITS if unit.lower() == found[2].lower())
    return round(float(found[1].replace(",", "")) * UNITS[unit])


def size_text(size: int) -> str:
    """Bytes in words: 812 bytes, 2.15 GB."""
    unit = next((unit for unit in ("TB", "GB", "MB", "KB") if size >= UNITS[unit]), "bytes")
    return f"{size / UNITS[unit]:.3g} {unit}" if unit != "bytes" else f"{size} bytes"


def planned_text(run_dir: Path, role: str | None) -> str:
    """What RUN/plan.json says of a process of this role; nothing where there is no such file or role."""
    try:
        processes: list[dict[str, Any]] = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))["processes"]
        roles = (role, "colocated") if role in ("rollout", "learner") else (role,)
        plan = next(process for process in processes if process["role"] in roles)
        largest = sorted(plan["lines"], key=lambda line: -line["bytes"])[:LINES_SHOWN]
        lines = ", ".join(f"{line['name']} {size_text(line['bytes'])}" for line in largest)
        return f"the plan said {size_text(plan['sum_bytes'])} for it, most of it {lines}"
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return ""


def advice(config: Config, part: str | None, phase: str) -> list[str]:
    """Settings that lessen what a part holds, as name=value, the most effective first; only such as the run does not
    have already."""
    if part == "rollout":
        return _rollout_advice(config)
    if part == "learner":
        return _learner_advice(config, phase)
    if part == "reference":
        return _reference_advice(config)
    if part == "reward":
        return [
            "batch_tokens=8192 among the kwargs of a reward model",
            "cluster.reward_workers on another machine",
        ]
    return []


def _rollout_advice(config: Config) -> list[str]:
    rollout, found = config.rollout, []
    smallest = rollout.page_size * kv_pages(
        1, rollout.max_new_tokens, [config.data.max_prompt_tokens], rollout.page_size
    )
    if rollout.kv_budget_bytes == "auto":
        found.append(f"rollout.kv_budget_tokens={2 * smallest} or more, in place of rollout.kv_budget_bytes=auto")
    elif rollout.kv_budget_bytes is not None:
        found.append(f"rollout.kv_budget_bytes={parse_bytes(rollout.kv_budget_bytes) // 2}")
    elif rollout.kv_budget_tokens is not None and rollout.kv_budget_tokens > smallest:
        found.append(f"rollout.kv_budget_tokens={max(smallest, rollout.kv_budget_tokens // 2)}")
    elif rollout.slots > 1:
        found.append(f"rollout.slots={rollout.slots // 2}")
    if rollout.schedule == "token_budget" and rollout.most_rows > 8:
        found.append(f"rollout.max_rows={rollout.most_rows // 2}")
    if rollout.kv_dtype == "auto" and not config.run.deterministic:
        found.append("rollout.kv_dtype=int8 with objective.importance=token_tis")
    return found


def _learner_advice(config: Config, phase: str) -> list[str]:
    learner, longest = config.learner, config.data.max_prompt_tokens + config.rollout.max_new_tokens
    rows, states = [], []
    if learner.max_tokens_per_micro_batch > longest:
        rows.append(f"learner.max_tokens_per_micro_batch={max(longest, learner.max_tokens_per_micro_batch // 2)}")
    if learner.activation_checkpointing == 0:
        rows.append(
            "learner.activation_checkpointing=1 (with learner.recompute_granularity=selective it costs hardly any time)"
        )
    elif learner.activation_checkpointing > 1 or learner.recompute_granularity == "selective":
        rows.append("learner.activation_checkpointing=1 with learner.recompute_granularity=full")
    if learner.logprob_chunk_tokens > 256:
        rows.append(f"learner.logprob_chunk_tokens={learner.logprob_chunk_tokens // 4}")
    if learner.optimizer == "adamw" and learner.backend == "fsdp" and not learner.offload_optimizer:
        states.append("learner.optimizer=adamw_8bit")
    if config.cluster.learner_gpus and not learner.offload_optimizer and learner.optimizer == "adamw":
        states.append("learner.offload_optimizer=true")
    if learner.lora_rank == 0:
        states.append("learner.lora_rank=16")
    if learner.backend == "deepspeed" and learner.zero_stage < 3:
        states.append("learner.zero_stage=3")
    reference = config.reference
    if (
        config.objective.needs_reference
        and reference.placement == "learner"
        and not reference.offload
        and config.cluster.learner_gpus
    ):
        states.append("reference.offload=true")
    return [*states, *rows] if phase in ("setup", "optimizer", "sync", "save") else [*rows, *states]


def _reference_advice(config: Config) -> list[str]:
    reference, longest = config.reference, config.data.max_prompt_tokens + config.rollout.max_new_tokens
    found = []
    if reference.placement == "workers" and reference.max_tokens_per_micro_batch > longest:
        found.append(f"reference.max_tokens_per_micro_batch={max(longest, reference.max_tokens_per_micro_batch // 2)}")
    if reference.placement == "workers" and not config.objective.kl_in_reward:
        found.append("reference.placement=learner")
    if reference.placement == "learner" and not reference.offload and config.cluster.learner_gpus:
        found.append("reference.offload=true")
    if not config.objective.kl_in_reward:
        found.append("objective.kl_coef=0 (no reference)")
    return found


class KernelKills:
    """How many processes of this machine the kernel's OOM killer has ended since this was made."""

    def __init__(self, vmstat: Path = Path("/proc/vmstat")) -> None:
        self._vmstat = vmstat
        self._before = self._count()

    def add_to(self, said: str) -> str:
        """What is said of a lost worker, and that the kernel has ended a process since the last call, or the start."""
        before, self._before = self._before, self._count()
        if self._before == before:
            return said
        return said + "; out of memory: the kernel's OOM killer has ended a process on the driver's machine"

    def _count(self) -> int:
        """0 also where the kernel does not tell."""
        try:
            found = re.search(r"^oom_kill (\d+)$", self._vmstat.read_text(), re.MULTILINE)
        except OSError:
            return 0
        return int(found[1]) if found else 0
