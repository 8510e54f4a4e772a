"""User functions as TRL, verl and OpenRLHF call them: told apart by the names of their parameters, given what those
trainers give.

    trl         f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns) -> [number or
    None]
    environments  f(environments, completions, prompts, log_extra, log_metric, **columns): TRL's, of trajectories with
    tools, each in its environment's process with environments of one
    verl        f(data_source, solution_str, ground_truth, extra_info) -> number or {"score": number, ...}
    verl_batch  f(data_sources, solution_strs, ground_truths, extra_infos) -> a list of those
    openrlhf    f(queries, prompts, labels) -> {"rewards": ..., "extra_logs": {...}} or the rewards alone

Sources: TRL 1.16.0 GRPOTrainer._calculate_rewards; verl 0.9.1 NaiveRewardManager and BatchRewardManager; OpenRLHF
0.11.2 SingleTurnExecutor. TRL's `prompts` and `completions` are strings, or lists of chat messages where the row's
own `prompt` column is one or the trajectory has several turns. Columns a function has no parameter for are left out.
A coroutine function is awaited.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from infsample_rl.data.fields import as_given

GIVEN = {  # the first name is the one that tells the form
    "environments": ("environments", "completions", "prompts", "log_extra", "log_metric"),
    "trl": ("completions", "prompts", "completion_ids", "trainer_state", "log_extra", "log_metric"),
    "verl": ("solution_str", "data_source", "ground_truth", "extra_info"),
    "verl_batch": ("solution_strs", "data_sources", "ground_truths", "extra_infos"),
    "openrlhf": ("queries", "prompts", "labels"),
}
OF_TRL = ("trl", "environments")
ANSWERS = ("ground_truth", "ground_truths", "labels")  # parameters of the other forms that are a row's answer
_FORMS = (
    "(prompts, completions, **columns) as for TRL, (data_source, solution_str, ground_truth, extra_info) as for verl, "
    "or (queries, prompts, labels) as for OpenRLHF"
)

Function = Callable[..., Any]
Reported = dict[str, list[Any]]  # what a function reports beside its rewards, by name: a value for every sample
Called = tuple[list[Any], Reported]  # what it returned for every sample, and that


def form_of(label: str, function: Function, kwargs: dict[str, Any]) -> str:
    """The form whose parameters the function has; ValueError when they fit none."""
    parameters = inspect.signature(function).parameters
    fitting = [form for form, given in GIVEN.items() if given[0] in parameters]
    fitting = fitting[:1] if "environments" in fitting else fitting
    if len(fitting) != 1:
        raise ValueError(f"reward.functions: {label}({', '.join(parameters)}) fits no form: {_FORMS}")
    form = fitting[0]
    check_keywords(label, function, kwargs, given=GIVEN[form])
    missing = [name for name in required(function) if name not in (*GIVEN[form], *kwargs)]
    if form not in OF_TRL and missing:  # TRL's others are columns of the data
        raise ValueError(
            f"reward.functions: {label} needs {missing[0]}, which {form}'s form does not give: {_FORMS}; set it in "
            "kwargs"
        )
    return form


def columns_of(form: str, function: Function, kwargs: dict[str, Any]) -> list[str]:
    """The columns that a function needs: parameters of TRL's form that nothing else gives, and the answer where another
    form's function cannot be called without."""
    if form not in OF_TRL:
        return ["answer"] if any(name in ANSWERS and name not in kwargs for name in required(function)) else []
    return [name for name in required(function) if name not in (*GIVEN[form], *kwargs)]


def check_keywords(label: str, function: Function, kwargs: dict[str, Any], given: Sequence[str]) -> None:
    """ValueError when the configured keywords are not parameters of the function, or are given by the caller
    already."""
    parameters = inspect.signature(function).parameters
    own = [name for name in parameters if name not in given]
    for name in kwargs:
        if name in given or (name not in parameters and not _takes_any(function)):
            raise ValueError(
                f"reward.functions: {label} takes no setting {name!r} in kwargs; it takes {', '.join(own) or 'none'}"
            )


def call_form(
    form: str, function: Function, kwargs: dict[str, Any], prompt: dict[str, Any], samples: list[dict[str, Any]]
) -> Called:
    """One call: all samples of a prompt for trl and verl_batch, else one sample. ValueError for what does not fit."""
    if form in OF_TRL:
        return _call_trl(function, kwargs, prompt, samples)
    if form == "openrlhf":
        return _call_openrlhf(function, kwargs, prompt, samples[0])
    each = [_verl_arguments(prompt, sample) for sample in samples]
    if form == "verl":
        return _scores([_call(function, each[0] | kwargs)])
    plural = {
        many: [entry[one] for entry in each] for many, one in zip(GIVEN["verl_batch"], GIVEN["verl"], strict=True)
    }
    return _scores(_values(_call(function, plural | kwargs), len(samples)))


def _call_trl(
    function: Function, kwargs: dict[str, Any], prompt: dict[str, Any], samples: list[dict[str, Any]]
) -> Called:
    count, reported = len(samples), Reported()
    columns = as_given(prompt["columns"])
    own = [sample.get("messages") for sample in samples]
    conversational = isinstance(columns.get("prompt"), list) or any(own)
    texts = [sample["text"] for sample in samples]
    said = [messages or [{"role": "assistant", "content": text}] for messages, text in zip(own, texts, strict=True)]
    arguments = {name: [value] * count for name, value in columns.items() if name not in ("prompt", "completion")}
    given: dict[str, Any] = {
        "prompts": [prompt["messages"] if conversational else prompt["text"]] * count,
        "completions": said if conversational else texts,
        "completion_ids": [sample["token_ids"] for sample in samples],
        "trainer_state": SimpleNamespace(**prompt.get("trainer_state", {})),
        "log_extra": lambda name, values: reported.update({str(name): list(values)}),
        "log_metric": lambda name, value: reported.update({str(name): [value] * count}),
    }
    if samples and "environment" in samples[0]:
        given["environments"] = [sample["environment"] for sample in samples]
    return _values(_call(function, arguments | given | kwargs), count), reported


def _call_openrlhf(
    function: Function, kwargs: dict[str, Any], prompt: dict[str, Any], sample: dict[str, Any]
) -> Called:
    """A query is prompt and response, a label what data.answer_field holds, as it is."""
    label = "" if prompt.get("label") is None else prompt["label"]
    arguments = {"queries": [prompt["text"] + sample["text"]], "prompts": [prompt["text"]], "labels": [label]}
    value = _call(function, arguments | kwargs)
    value = value if isinstance(value, dict) else {"rewards": value}
    logs = value.get("extra_logs") or {}
    return [_only(_entry(value, "rewards"))], {str(name): [_only(logged)] for name, logged in logs.items()}


def _verl_arguments(prompt: dict[str, Any], sample: dict[str, Any]) -> dict[str, Any]:
    columns = prompt["columns"]
    ground_truth = columns.get("ground_truth")
    return {
        "data_source": columns.get("data_source"),
        "solution_str": sample["text"],
        "ground_truth": columns.get("answer") if ground_truth is None else ground_truth,
        "extra_info": {
            **(columns.get("extra_info") or {}),
            "num_turns": 1 + (len(sample.get("messages") or []) or 1),
            "rollout_reward_scores": {},
        },
    }


def _scores(values: list[Any]) -> Called:
    """Numbers, and "score" of dicts; their other entries are reported."""
    dicts = [value if isinstance(value, dict) else {"score": value} for value in values]
    names = dict.fromkeys(name for value in dicts for name in value if name != "score")
    reported = {str(name): [value.get(name) for value in dicts] for name in names}
    return [_entry(value, "score") for value in dicts], reported


def _entry(value: dict[str, Any], name: str) -> Any:
    if name not in value:
        raise ValueError(
            f"the function returned a dict without {name!r}; its keys are {', '.join(map(str, value)) or 'none'}"
        )
    return value[name]


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


def _call(function: Function, arguments: dict[str, Any]) -> Any:
    value = function(**accepted(function, arguments))
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def accepted(function: Function, given: dict[str, Any]) -> dict[str, Any]:
    """What of `given` a function has parameters for."""
    parameters, takes_any = inspect.signature(function).parameters, _takes_any(function)
    return {name: value for name, value in given.items() if takes_any or name in parameters}


def _takes_any(function: Function) -> bool:
    return any(parameter.kind == parameter.VAR_KEYWORD for parameter in inspect.signature(function).parameters.values())


def required(function: Function) -> list[str]:
    """Its parameters without a default; none of one of C that does not say: calling it will tell."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return []
    return [one.name for one in parameters if one.kind not in variadic and one.default is one.empty]
