"""When memory runs out: who asked for it, in which phase, what the plan said of it, which settings lessen it.

A failure travels as text: a worker's exception, or what Ray says of a process that is gone. `explain` adds to such a
line what helps; lines that are not of memory stay as they are.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from infsample_rl.plan.devices import gigabytes

OUT_OF_MEMORY = re.compile(
    r"out of memory|(?:can't|cannot) allocate memory|unable to allocate|MemoryError|std::bad_alloc|low on "
    r"memory|OutOfMemory|OUT_OF_MEMORY",
    re.IGNORECASE,
)
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
LESS = {  # settings that lessen what a part holds, the most effective first
    "rollout": "a smaller rollout.kv_budget_bytes, rollout.slots or rollout.max_rows, or rollout.kv_dtype=int8 with "
    "objective.importance=token_tis",
    "learner": "a smaller learner.max_tokens_per_micro_batch or learner.logprob_chunk_tokens, "
    "learner.activation_checkpointing=1, learner.optimizer=adamw_8bit, learner.offload_optimizer=true or "
    "learner.lora_rank=16",
    "reference": "a smaller reference.max_tokens_per_micro_batch, reference.offload=true, or objective=no_kl",
    "reward": "a smaller batch_tokens among the kwargs of a reward model, or fewer cluster.reward_workers",
}
SAID = "ran out of memory"  # in a line that has been explained
LINES_SHOWN = 3  # of the plan, the largest


def is_out_of_memory(text: str) -> bool:
    """Whether a failure's text speaks of memory that was not there."""
    return OUT_OF_MEMORY.search(text) is not None


def explain(text: str, run_dir: str | None) -> str:
    """A failure's line, and if it is one of memory: whose, what plan.json predicted, settings to change.

    Example: "learner rank 0: CUDA out of memory. ... in phase backward" -> "learner rank 0 ran out of memory in phase
    backward; the plan said 9.9 GB for it, most of it activations 6.1 GB, ...; take ... (<the text>)"
    """
    if not is_out_of_memory(text) or SAID in text:
        return text
    who, phase = WHO.search(text), PHASE.search(text)
    name, role = (who[0], who[1]) if who else ("the driver", None)
    if text.startswith("every reward of "):  # so many steps, as the driver says
        name, role = "a reward function or model", "reward"
    part = PART_OF_PHASE.get(phase[1] if phase else "", role)
    said = [f"{name} {SAID}" + (f" in phase {phase[1]}" if phase else "")]
    said += filter(None, [planned_text(Path(run_dir or "."), role)])
    said += [f"take {LESS[part]}"] if part is not None else []
    return f"{'; '.join(said)} ({text})"


def planned_text(run_dir: Path, role: str | None) -> str:
    """What RUN/plan.json says of a process of this role; nothing where there is no such file or role."""
    try:
        processes: list[dict[str, Any]] = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))["processes"]
        roles = (role, "colocated") if role in ("rollout", "learner") else (role,)
        plan = next(process for process in processes if process["role"] in roles)
        largest = sorted(plan["lines"], key=lambda line: -line["bytes"])[:LINES_SHOWN]
        lines = ", ".join(f"{line['name']} {gigabytes(line['bytes'])}" for line in largest)
        return f"the plan said {gigabytes(plan['sum_bytes'])} for it, most of it {lines}"
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return ""
