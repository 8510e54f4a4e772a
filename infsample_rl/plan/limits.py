"""The largest settings that still fit: slots, pages and rows of a pool, tokens of a learner row, G."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from infsample_rl.config import Config
from infsample_rl.config.rollout import DEFAULT_SLOTS, MOST_ROWS
from infsample_rl.plan.devices import Device, gigabytes
from infsample_rl.plan.model_outline import ModelOutline
from infsample_rl.plan.processes import ProcessPlan, plan_role
from infsample_rl.plan.rollout_memory import pool_page_bytes, pool_pages, prompt_pages, response_pages
from infsample_rl.rollout.schedule.kv_budget import CPU_SHARE

ROW_STEP, MOST_ROW_TOKENS, TRIES = 256, 2**18, 6
FILLED = 0.8  # of the KV memory that is free; below it lies idle


def with_settings(config: Config, **changes: Any) -> Config:
    """The settings with others: with_settings(config, learner__lora_rank=16). ValueError for those that do not go
    together."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        section, _, key = name.partition("__")
        sections.setdefault(section, {})[key] = value
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    )


def largest_pool(config: Config, model: ModelOutline, plan: ProcessPlan, device: Device) -> dict[str, int]:
    """Pages that fit beside everything else of a rollout worker, and what they hold: full responses (slots) and rows; 0
    where nothing does.

    What else there is grows with the rows, so what has been found is planned again, and lessened by what it is too
    much.
    """
    pool, page = sum(size for name, size in plan.lines.items() if "KV pool" in name), pool_page_bytes(config, model)
    pages = max(0, (device.usable_bytes - plan.sum_bytes + pool) // page - 1)
    for _ in range(TRIES):
        slots = max(0, pages - prompt_pages(config)) // response_pages(config)
        excess = _sum_of_pool(config, model, plan.role, pages, slots) - device.usable_bytes if slots else 0
        if excess <= 0:
            break
        pages = max(0, pages + excess // -page)
    rows = min(pages, config.rollout.max_rows or MOST_ROWS) if config.rollout.schedule == "token_budget" else slots
    return {"pages": pages, "slots": slots, "rows": rows if slots else 0}


def idle_memory(config: Config, model: ModelOutline, plan: ProcessPlan, most: dict[str, int]) -> str | None:
    """What a rollout worker's samples use of the KV memory that is free, what limits them and what to set; None where
    it is at least FILLED of what there is, or of what a step's samples can fill. `most`: of largest_pool()."""
    rollout, page, of_response = config.rollout, pool_page_bytes(config, model), response_pages(config)
    pool = sum(size for name, size in plan.lines.items() if "KV pool" in name) // page
    # processes on the CPU share its memory
    free = most["pages"] if plan.gpus else int(CPU_SHARE * most["pages"]) // plan.count
    samples = -(-config.samples_per_step // plan.count)
    prompts = prompt_pages(config)
    fillable = min(free, samples * of_response + prompts)
    used = min(pool, min(rollout.most_rows, samples) * of_response + prompts)
    if used >= FILLED * fillable:
        return None
    fit = max(1, (fillable - prompts) // of_response)
    if rollout.schedule == "token_budget" and rollout.most_rows * of_response + prompts < FILLED * fillable:
        if rollout.most_rows < (rollout.max_rows or MOST_ROWS):
            limit, change = f"rollout.prompts_at_once={rollout.prompts_at_once}", "rollout.prompts_at_once=auto"
        else:
            limit, change = f"rollout.max_rows={rollout.most_rows}", f"rollout.max_rows={fit}"
    elif rollout.has_budget and (rollout.schedule == "token_budget" or rollout.num_slots is None):
        name = "kv_budget_bytes" if rollout.kv_budget_bytes is not None else "kv_budget_tokens"
        limit, change = f"rollout.{name}={getattr(rollout, name)}", "rollout.kv_budget_bytes=auto"
    else:
        follow = rollout.schedule == "token_budget" or rollout.has_budget  # slots follow from the budget
        change = "rollout.slots=" + ("null" if follow else str(fit))
        limit = f"rollout.slots={rollout.slots or DEFAULT_SLOTS}"
    return (
        f"uses {gigabytes(used * page)} of {gigabytes(free * page)} of KV memory: rows limited by {limit}; set {change}"
    )


def _sum_of_pool(config: Config, model: ModelOutline, role: str, pages: int, slots: int) -> int:
    """Bytes of the process with a pool of so many pages and, of a fixed-slot schedule, as many rows as they have
    slots."""
    tokens = pages * config.rollout.page_size
    changed = with_settings(config, rollout__kv_budget_bytes=None, rollout__kv_budget_tokens=tokens)
    if config.rollout.schedule != "token_budget":
        group = max(config.rollout.group_size, slots)
        with contextlib.suppress(ValueError):  # such a group does not go with another setting
            changed = with_settings(changed, rollout__slots=slots, rollout__group_size=group)
    return plan_role(changed, model, "learner" if role == "colocated" else "rollout").sum_bytes


def largest_row(config: Config, model: ModelOutline, device: Device) -> int | None:
    """Tokens of the longest learner row that fits, in steps of 256; None where not even one prompt with one response
    does.

    A row's bytes grow nearly in a line with its tokens, so a few tries between one that fits and one that does not are
    enough.
    """
    fewest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    samples = config.rollout.group_size * config.rollout.max_new_tokens
    most = max(fewest, min(MOST_ROW_TOKENS, config.data.prompts_per_step * (config.data.max_prompt_tokens + samples)))

    if config.rollout.takes_free_memory:  # what rows leave it
        fewest_tokens = pool_pages(config, model, 0) * config.rollout.page_size
        config = with_settings(config, rollout__kv_budget_bytes=None, rollout__kv_budget_tokens=fewest_tokens)

    def taken(tokens: int) -> int:
        return plan_role(with_settings(config, learner__max_tokens_per_micro_batch=tokens), model, "learner").sum_bytes

    fitting, too_many, room = fewest, most, device.usable_bytes
    at_fitting, at_most = taken(fewest), taken(most)
    if at_fitting > room:
        return None
    if at_most <= room:
        return most
    for _ in range(TRIES):
        share = (room - at_fitting) / (at_most - at_fitting)
        tokens = int(fitting + share * (too_many - fitting)) // ROW_STEP * ROW_STEP
        if tokens <= fitting:
            break
        size = taken(tokens)
        if size <= room:
            fitting, at_fitting = tokens, size
        else:
            too_many, at_most = tokens, size
        if room - at_fitting < 0.02 * room:
            break
    return fitting
