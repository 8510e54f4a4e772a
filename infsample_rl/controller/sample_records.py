"""What samples.jsonl keeps of a step: of a few prompts, who decoded when, what was predicted and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from infsample_rl.config import Config
from infsample_rl.controller.groups import Group, SampleRecord, StepGroups
from infsample_rl.model.response_text import response_text
from infsample_rl.types import Completion

TEXT_END = 80  # characters of a response's beginning, and of its end, that are kept
PROMPT_CHARACTERS = 400  # of a prompt's end, where the question is

Fetch = Callable[[int], list[Completion] | None]


def sample_records(
    groups: StepGroups, fetch: Fetch, tokenizer: PreTrainedTokenizerBase, config: Config, *, step: int
) -> list[dict[str, Any]]:
    """A record for each of Config.timeline_prompts. Times are seconds since its `started`, a time.time().

    Example: {"step": 3, "prompt_index": 0, "row": 17, "started": 1763630000.25, "prompt": "1 + 1 = ?", "samples":
    [{"sample_index": 0, "length": 24, "finish_reason": "stop", "reward": 1.0, "worker": 0, "forecast": [8, 31.5],
    "text": "2", "stays": [[2, 40, 64, 0.0, 1.25, 24]]}]}
    """
    chosen = [group for group in groups.groups if any(sample.stays for sample in group.samples)]
    return [_group_record(group, fetch, tokenizer, config.rollout.stop_strings, step) for group in chosen]


def _group_record(
    group: Group, fetch: Fetch, tokenizer: PreTrainedTokenizerBase, stop_strings: list[str], step: int
) -> dict[str, Any]:
    samples = group.samples
    started = min(stay.started for sample in samples for stay in sample.stays)
    texts: dict[int, list[str]] = {}
    for key in {sample.micro_group for sample in samples}:
        completions = fetch(key) or []  # gone since it was trained
        texts[key] = [
            ends_of(response_text(tokenizer, completion.token_ids.tolist(), stop_strings)) for completion in completions
        ]
    return {
        "step": step,
        "prompt_index": group.prompt.prompt_index,
        "row": group.prompt.row,
        "started": started,
        "prompt": group.prompt.text[-PROMPT_CHARACTERS:],
        "samples": [_sample_record(sample, texts[sample.micro_group], started) for sample in samples],
    }


def _sample_record(sample: SampleRecord, texts: list[str], started: float) -> dict[str, Any]:
    return {
        "sample_index": sample.sample_index,
        "length": sample.length,
        "finish_reason": sample.finish_reason,
        "reward": sample.reward,
        "worker": sample.worker,
        "forecast": None if sample.forecast is None else [sample.forecast.known, round(sample.forecast.tokens, 1)],
        "text": texts[sample.position] if sample.position < len(texts) else None,
        "stays": [
            [s.row, s.start, s.end, round(s.started - started, 4), round(s.ended - started, 4), s.tokens]
            for s in sample.stays
        ],
    }


def ends_of(text: str) -> str:
    """Beginning and end of a long text: ends_of("a" * 100 + "b" * 100) -> 80 a, " ... ", 80 b."""
    return text if len(text) <= 2 * TEXT_END + 5 else f"{text[:TEXT_END]} ... {text[-TEXT_END:]}"
