"""The largest settings that still fit: slots, pages and rows of a pool, tokens of a learner row, G."""

from __future__ import annotations

import dataclasses
from typing import Any

from infsample_rl.config import Config
from infsample_rl.plan.devices import Device
from infsample_rl.plan.model_outline import ModelOutline
from infsample_rl.plan.process_plan import ProcessPlan
from infsample_rl.plan.processes import plan_role
from infsample_rl.plan.rollout_memory import pool_page_bytes, prompt_pages, response_pages

ROW_STEP, MOST_ROW_TOKENS, TRIES = 256, 2**18, 6


def with_settings(config: Config, **changes: Any) -> Config:
    """The settings with others: with_settings(config, learner__lora_rank=16). ValueError for those that do not go together."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        section, _, key = name.partition("__")
        sections.setdefault(section, {})[key] = value
    return dataclasses.replace(config, **{name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()})


def largest_pool(config: Config, model: ModelOutline, plan: ProcessPlan, device: Device) -> dict[str, int]:
    """Pages that fit beside everything else of a rollout worker, and what they hold: full responses (slots) and rows; 0 where nothing does."""
    pool = sum(size for name, size in plan.lines.items() if "KV pool" in name)
    pages = max(0, (device.usable_bytes - plan.sum_bytes + pool) // pool_page_bytes(config, model) - 1)
    slots = max(0, pages - prompt_pages(config)) // response_pages(config)
    rows = min(pages, config.rollout.max_rows or 256) if config.rollout.schedule == "token_budget" else slots
    return {"pages": pages, "slots": slots, "rows": rows if slots else 0}


def largest_group(config: Config, limits: dict[str, int]) -> int | None:
    """G that fits; None: any, since no schedule but full_group holds more for a larger one."""
    return limits["slots"] if config.rollout.schedule == "full_group" else None


def largest_row(config: Config, model: ModelOutline, device: Device) -> int | None:
    """Tokens of the longest learner row that fits, in steps of 256; None where not even one prompt with one response does.

    A row's bytes grow nearly in a line with its tokens, so a few tries between one that fits and one that does not are enough.
    """
    fewest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    samples = config.rollout.group_size * config.rollout.max_new_tokens
    most = min(MOST_ROW_TOKENS, config.data.prompts_per_step * (config.data.max_prompt_tokens + samples))

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
