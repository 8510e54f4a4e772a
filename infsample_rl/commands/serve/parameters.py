"""What requests may ask of the engine: sampling parameters by the names of OpenAI and vLLM, checked before they
wait."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from infsample_rl.config import RolloutConfig
from infsample_rl.config.fields import LEAST_TEMPERATURE
from infsample_rl.reward.policy_requests import Refused

MOST_SAMPLES = 1024  # of one request
WITHOUT_SEED = 1 << 63  # numbers from here on, of 64 bits, are of the noise of requests without a seed
LEAST_SEED = -(1 << 62)  # as 64 bits far above any of those
# what a client may send since it changes nothing: whatever its value, or the value that is no wish
WITHOUT_EFFECT = {
    *("skip_special_tokens", "spaces_between_special_tokens", "detokenize", "routed_experts_prompt_start"),
    *("metadata", "store"),
}
NEUTRAL: dict[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "ignore_eos": False,
    "logit_bias": {},
    "bad_words": [],
    "best_of": 1,
    "prompt_logprobs": None,
    "include_stop_str_in_output": False,
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
}


@dataclass(frozen=True)
class SampleRequest:
    """Some samples of one prompt."""

    prompt_ids: list[int]
    count: int
    seed: int | None  # of its noise; None: any
    config: RolloutConfig  # by which it is sampled, equal for requests that decode together


def read_parameters(
    given: Mapping[str, Any], prompt_ids: list[int], config: RolloutConfig, *, vocab_size: int, context: int | None
) -> SampleRequest:
    """`given`: by the names of vLLM's sampling parameters; what is not in it is as in the run's settings. Refused
    for what is unknown, out of bounds or not served, and for a prompt that has no room for a response."""
    if not prompt_ids or not all(type(each) is int and 0 <= each < vocab_size for each in prompt_ids):
        raise Refused(f"the prompt must be ids from 0 to {vocab_size - 1}, at least one", parameter="token_ids")
    known = {"temperature", "top_p", "top_k", "min_p", "max_tokens", "n", "seed", "stop", "stop_token_ids", "logprobs"}
    for name, value in given.items():
        if value is None or name in known or name in WITHOUT_EFFECT:
            continue
        if name in NEUTRAL and value != NEUTRAL[name]:
            raise _refused(name, value, "which is not served")
        if name not in NEUTRAL:
            raise _refused(name, value, f"which is unknown; known are {', '.join(sorted(known))}")
    if given.get("logprobs") not in (None, False, True, 0, 1):
        raise _refused("logprobs", given["logprobs"], "but of each place the sampled token alone is served: give 1")
    top_k = _number(given, "top_k", config.top_k, low=-1, whole=True)
    room = config.max_new_tokens if context is None else min(config.max_new_tokens, context - len(prompt_ids))
    if room < 1:
        raise Refused(f"the prompt has {len(prompt_ids)} tokens, of a context of {context} for it and a response")
    temperature = _number(given, "temperature", config.temperature, low=0, high=10)
    if 0 < temperature < LEAST_TEMPERATURE:
        raise _refused("temperature", temperature, f"which must be 0 or >= {LEAST_TEMPERATURE}")
    stop = given.get("stop") or ()
    sampling = replace(
        config,
        temperature=temperature,
        top_p=_number(given, "top_p", config.top_p, low=1e-6, high=1),
        top_k=max(0, int(top_k)),  # vLLM's -1 is all
        min_p=_number(given, "min_p", config.min_p, low=0, high=1),
        max_new_tokens=int(_number(given, "max_tokens", room, low=1, high=room, whole=True)),
        stop_token_ids=[*config.stop_token_ids, *sorted(set(_ids(given.get("stop_token_ids") or (), vocab_size)))],
        stop_strings=[*config.stop_strings, *((stop,) if isinstance(stop, str) else _texts(stop))],
    )
    seed = given.get("seed")
    if seed is not None and not (type(seed) is int and LEAST_SEED <= seed < WITHOUT_SEED):
        raise _refused("seed", seed, "which must be an integer from -2^62 to 2^63 - 1")
    count = int(_number(given, "n", 1, low=1, high=MOST_SAMPLES, whole=True))
    return SampleRequest(prompt_ids, count, seed, sampling)


def _number(
    given: Mapping[str, Any], name: str, default: float, *, low: float, high: float = math.inf, whole: bool = False
) -> float:
    value = given.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not low <= value <= high:
        bounds = f">= {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise _refused(name, value, f"which must be {'an integer ' if whole else ''}{bounds}")
    return value


def _ids(given: Any, vocab_size: int) -> list[int]:
    if not isinstance(given, (list, tuple)) or not all(type(each) is int and 0 <= each < vocab_size for each in given):
        raise _refused("stop_token_ids", given, f"which must be ids from 0 to {vocab_size - 1}")
    return list(given)


def _texts(given: Any) -> tuple[str, ...]:
    if not isinstance(given, (list, tuple)) or not all(isinstance(each, str) and each for each in given):
        raise _refused("stop", given, "which must be texts")
    return tuple(given)


def _refused(name: str, value: Any, why: str) -> Refused:
    return Refused(f"{name}={str(value)[:60]}, {why}", parameter=name)
