"""User functions as TRL, verl and OpenRLHF call them: told apart by the names of their parameters, given what those
trainers give.

    trl         f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns) -> [number or
    None]
    verl        f(data_source, solution_str, ground_truth, extra_info) -> number or {"score": number, ...}
    verl_batch  f(data_sources, solution_strs, ground_truths, extra_infos) -> a list of those
    openrlhf    f(queries, prompts, labels) -> {"rewards": ..., "extra_logs": {...}} or the rewards alone

Sources: TRL 1.16.0 GRPOTrainer._calculate_rewards; verl 0.9.1 NaiveRewardManager and BatchRewardManager; OpenRLHF
0.11.2 SingleTurnExecutor. TRL's `prompts` and `completions` are strings, or lists of chat messages where the row's own
`prompt` column is one. Columns a function has no parameter for are left out. A coroutine function is awaited.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from infsample_rl.data.fields import RAW_ANSWER

_GIVEN = {
    "trl": ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "verl_batch": ("data_sources", "solution_strs", "ground_truths", "extra_infos"),
    "openrlhf": ("queries", "prompts", "labels"),
}
_TOLD_BY = {"trl": "completions", "verl": "solution_str", "verl_batch": "solution_strs", "openrlhf": "queries"}
_FORMS = (
    "(prompts, completions, **columns) as for TRL, (data_source, solution_str, ground_truth, extra_info) as for verl, "
    "or (queries, prompts, labels) as for OpenRLHF"
)

Reported = dict[str, list[Any]]  # what a function reports beside its rewards, by name: a value for every sample
Called = tuple[list[Any], Reported]  # what it returned for every sample, and that


def form_of(label: str, function: Callable[..., Any], kwargs: dict[str, Any]) -> str:
    """The form whose parameters the function has; ValueError when they fit none."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError as error:
        raise ValueError(f"reward.functions: {label} has no readable signature; write a function {_FORMS}") from error
    fitting = [form for form, name in _TOLD_BY.items() if name in parameters]
    if len(fitting) != 1:
        raise ValueError(f"reward.functions: {label}({', '.join(parameters)}) fits no form: {_FORMS}")
    form = fitting[0]
    positional_only = [name for name, parameter in parameters.items() if parameter.kind == parameter.POSITIONAL_ONLY]
    if positional_only:
        raise ValueError(
            f"reward.functions: {label} takes {positional_only[0]} by position only; all are given by name: {_FORMS}"
        )
    check_keywords(label, function, kwargs, given=_GIVEN[form])
    missing = [name for name in _required(function) if name not in (*_GIVEN[form], *kwargs)]
    if form != "trl" and missing:  # TRL's others are columns of the data
        raise ValueError(
            f"reward.functions: {label} needs {missing[0]}, which {form}'s form does not give: {_FORMS}; set it in "
            "kwargs"
        )
    return form


def check_keywords(label: str, function: Callable[..., Any], kwargs: dict[str, Any], given: Sequence[str]) -> None:
    """ValueError when the configured keywords are not parameters of the function, or are given by the caller
    already."""
    parameters = inspect.signature(function).parameters
    own = [name for name in parameters if name not in given]
    for name in kwargs:
        if name in given or (name not in parameters and not _takes_any(function)):
            raise ValueError(
                f"reward.functions: {label} takes no setting {name!r} in kwargs; it takes {', '.join(own) or 'none'}"
            )


def call_trl(
    function: Callable[..., Any], kwargs: dict[str, Any], prompt: dict[str, Any], samples: list[dict[str, Any]]
) -> Called:
    """Call TRL's form once for all samples of one prompt; ValueError for a missing column or a wrong number of
    values."""
    count, reported = len(samples), {}
    columns = {
        name: value for name, value in _columns(prompt).items() if name not in ("prompt", "completion", *_GIVEN["trl"])
    }
    conversational = isinstance(prompt["columns"].get("prompt"), list)
    texts = [sample["text"] for sample in samples]
    arguments: dict[str, Any] = {name: [value] * count for name, value in columns.items()}
    arguments |= {
        "prompts": [prompt["messages"] if conversational else prompt["text"]] * count,
        "completions": [[{"role": "assistant", "content": text}] for text in texts] if conversational else texts,
        "completion_ids": [sample["token_ids"] for sample in samples],
        "trainer_state": SimpleNamespace(**prompt.get("trainer_state", {})),
        "log_extra": lambda name, values: reported.update({str(name): list(values)}),
        "log_metric": lambda name, value: reported.update({str(name): [value] * count}),
    }
    arguments |= kwargs
    missing = [name for name in _required(function) if name not in arguments]
    if missing:
        raise ValueError(f"the function needs the column {missing[0]!r}; the row has {', '.join(columns) or 'none'}")
    return _values(_call(function, arguments), count), reported


def call_verl(
    function: Callable[..., Any], kwargs: dict[str, Any], prompt: dict[str, Any], samples: list[dict[str, Any]]
) -> Called:
    """Call verl's form for one sample: a number, or a dict whose "score" is taken and whose other entries are
    reported."""
    arguments = _verl_arguments(prompt, samples[0])
    return _scores([_call(function, arguments | kwargs)])


def call_verl_batch(
    function: Callable[..., Any], kwargs: dict[str, Any], prompt: dict[str, Any], samples: list[dict[str, Any]]
) -> Called:
    """Call verl's batched form once for all samples of one prompt."""
    each = [_verl_arguments(prompt, sample) for sample in samples]
    singular = dict(zip(_GIVEN["verl_batch"], _GIVEN["verl"], strict=True))
    values = _call(function, {plural: [entry[name] for entry in each] for plural, name in singular.items()} | kwargs)
    return _scores(_values(values, len(samples)))


def call_openrlhf(
    function: Callable[..., Any], kwargs: dict[str, Any], prompt: dict[str, Any], samples: list[dict[str, Any]]
) -> Called:
    """Call OpenRLHF's form for one sample: a query is prompt and response, a label what data.answer_field holds, as it
    is."""
    label = prompt.get("label")
    arguments = {
        "queries": [prompt["text"] + samples[0]["text"]],
        "prompts": [prompt["text"]],
        "labels": ["" if label is None else label],
    }
    value = _call(function, arguments | kwargs)
    if not isinstance(value, dict):
        return [_only(value)], {}
    if "rewards" not in value:
        raise ValueError(
            f"the function returned a dict without 'rewards'; its keys are {', '.join(map(str, value)) or 'none'}"
        )
    logs = value.get("extra_logs") or {}
    return [_only(value["rewards"])], {str(name): [_only(logged)] for name, logged in logs.items()}


def _columns(prompt: dict[str, Any]) -> dict[str, Any]:
    """The row's columns, its own `answer` as the data has it: the gold answer cut from it is for the rules here."""
    columns = dict(prompt["columns"])
    raw = columns.pop(RAW_ANSWER, None)
    return columns if raw is None else columns | {"answer": raw}


def _verl_arguments(prompt: dict[str, Any], sample: dict[str, Any]) -> dict[str, Any]:
    columns = prompt["columns"]
    reward_model = columns.get("reward_model")
    ground_truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else columns.get("ground_truth")
    return {
        "data_source": columns.get("data_source"),
        "solution_str": sample["text"],
        "ground_truth": columns.get("answer") if ground_truth is None else ground_truth,
        # a question and its answer
        "extra_info": {**(columns.get("extra_info") or {}), "num_turns": 2, "rollout_reward_scores": {}},
    }


def _scores(values: list[Any]) -> Called:
    """Numbers, and "score" of dicts; their other entries are reported."""
    scores: list[Any] = []
    reported: Reported = {}
    for index, value in enumerate(values):
        if isinstance(value, dict):
            if "score" not in value:
                raise ValueError(
                    f"the function returned a dict without 'score'; its keys are {', '.join(map(str, value)) or 'none'}"
                )
            for name, entry in value.items():
                if name != "score":
                    reported.setdefault(str(name), [None] * len(values))[index] = entry
            value = value["score"]
        scores.append(value)
    return scores, reported


def _only(value: Any) -> Any:
    """The value of a list, array or tensor of one."""
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        value = value.tolist()
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def _values(values: Any, count: int) -> list[Any]:
    if isinstance(values, (str, bytes, dict)) or not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
        raise ValueError(f"the function must return a list of {count} rewards, got {values!r:.60}")
    if len(values) != count:
        raise ValueError(f"the function returned {len(values)} values for {count} samples")
    return list(values)


def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    if not _takes_any(function):
        parameters = inspect.signature(function).parameters
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    value = function(**arguments)
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _takes_any(function: Callable[..., Any]) -> bool:
    return any(parameter.kind == parameter.VAR_KEYWORD for parameter in inspect.signature(function).parameters.values())


def _required(function: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters
    return [
        name
        for name, parameter in parameters.items()
        if parameter.kind in kinds and parameter.default is parameter.empty
    ]
