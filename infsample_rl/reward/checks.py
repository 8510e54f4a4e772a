"""What is wrong with reward functions, found before a run starts: the functions themselves, and the columns that they
read, held against the rows.

A rule names its columns itself (NEEDS of its module), a judge in its prompt, a user's function by its parameters.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from infsample_rl.config import Config, RewardConfig
from infsample_rl.config.environment import of_row
from infsample_rl.config.reward import JudgeConfig
from infsample_rl.data.fields import RAW_ANSWER, Problem
from infsample_rl.data.rows import first_rows
from infsample_rl.reward.functions import IN_PROCESSES, kind_of
from infsample_rl.reward.hidden_values import hide_values_of
from infsample_rl.reward.judge import check_judge, criteria_column
from infsample_rl.reward.process_pool import FunctionProcess

logger = logging.getLogger(__name__)

Needs = list[list[str]]  # sets of columns, of which a row has to have one whole; none: nothing is read
Problems = Mapping[str, list[Problem]]  # by the names of sources in DataConfig.parts

NOT_GIVEN = ("prompt", "completion", RAW_ANSWER)  # columns that TRL's form has under other names


def check_reward_functions(reward: RewardConfig, factory: str | None = None) -> list[tuple[str, Needs]]:
    """Import every reward function in a process of its own and read every reward model's config, before a run starts.
    Returns the name of each and the columns it reads, for columns.check_columns(). `factory`: environment.factory.

    ValueError in one line: an unknown name, a missing file, function or model, a file that cannot be imported, a
    signature that fits no form, settings in kwargs that the function does not take, a model with more than one label, a
    judge that does not answer, a function that takes environments where there are none, a reward.isolation that this
    system cannot hold.
    """
    in_processes = [function for function in reward.functions if kind_of(function.name) in IN_PROCESSES]
    needs: dict[int, Needs] = {}
    if in_processes:
        process = FunctionProcess(reward, in_processes)
        process.kill()
        for function, form in zip(in_processes, process.forms, strict=True):
            if form == "environments" and factory is None:
                raise ValueError(
                    f"reward.functions: {function.name} takes environments; set environment.factory to their class"
                )
        needs = dict(zip(map(id, in_processes), process.needs, strict=True))
    hide_values_of(judge.key for judge in reward.judges if judge.key is not None)
    for function in reward.functions:
        if isinstance(function, JudgeConfig):
            needs[id(function)] = check_judge(function)
        elif kind_of(function.name) == "model":
            from infsample_rl.reward.reward_model import check_model

            check_model(function)
    return [(function.name, needs.get(id(function), [])) for function in reward.functions]


def check_columns(
    config: Config, needs: list[tuple[str, Needs]], problems: Problems, *, evaluation: bool = False
) -> dict[str, list[Problem]]:
    """The problems that every function can score which scores their source. ValueError for the first function whose
    columns some rows lack, or all of them where data.bad_rows=skip leaves such rows out.

    `needs`: name and columns of every one of reward.functions; `problems`: all rows by their sources, those of
    data.eval_source with `evaluation`. Example: "reward.functions: my.py:score needs the column 'level', which 2 of 9
    rows of data.source=a.jsonl lack (rows 3, 7); the columns are answer, topic".
    """
    usable = {}
    for source, own, label in _sources(config, problems, evaluation):
        for index in config.rewards_of(source):
            name, sets = needs[index]
            lacking = {each.row: missing for each in own if (missing := _missing(name, sets, each.columns))}
            if lacking:
                hint = "; a function that does without gives it a default" if kind_of(name) == "user" else ""
                fault = f"reward.functions: {name} needs the column {_where(lacking, sets, own, label)}{hint}"
                own = _others(own, lacking, fault, config.data.bad_rows)
            function = config.reward.functions[index]
            if isinstance(function, JudgeConfig):
                own = _with_criteria(function, own, label, config.data.bad_rows)
        usable[source] = own
    return usable


def _others(problems: list[Problem], lacking: Collection[int], fault: str, bad_rows: str) -> list[Problem]:
    """The problems but those of these rows, a `fault` that data.bad_rows may allow. ValueError where it does not, or
    none would be left."""
    if bad_rows == "error" or len(lacking) == len(problems):
        raise ValueError(fault + ("; data.bad_rows=skip leaves them out" if len(lacking) < len(problems) else ""))
    logger.warning("skipped: %s", fault)
    return [each for each in problems if each.row not in lacking]


def _with_criteria(judge: JudgeConfig, problems: list[Problem], label: str, bad_rows: str) -> list[Problem]:
    """The problems of which such a judge could give a verdict: a column of criteria must be a list of some."""
    column = criteria_column(judge)
    given = {each.row: each.columns.get(column) for each in problems if column is not None}
    wrong = [row for row, criteria in given.items() if not isinstance(criteria, list) or not criteria]
    if not wrong:
        return problems
    fault = (
        f"reward.functions: judge: the column {column!r} of its criteria must be a list of one or more, got "
        f"{given[wrong[0]]!r:.60} in row {wrong[0]} of {label}; {len(wrong)} of {len(problems)} rows are so "
        f"({first_rows(wrong)})"
    )
    return _others(problems, set(wrong), fault, bad_rows)


def check_environment_columns(
    config: Config, needed: Mapping[str, list[str]], problems: Problems, *, evaluation: bool = False
) -> dict[str, list[Problem]]:
    """As check_columns(), of what environments ask a row for, by their names."""
    usable = {}
    for source, own, label in _sources(config, problems, evaluation):
        lacking = dict[int, str]()
        for each in own:
            with contextlib.suppress(ValueError):  # it names no environment, which rendering it says
                missing = [name for name in of_row(needed, each.columns) if name not in each.columns]
                lacking.update((each.row, name) for name in missing[:1])
        if lacking:
            where = _where(lacking, [], own, label)
            fault = f"environment.factory={config.environment.factory} needs the column {where}"
            own = _others(own, lacking, fault, config.data.bad_rows)
        usable[source] = own
    return usable


def _sources(config: Config, problems: Problems, evaluation: bool) -> Iterator[tuple[str, list[Problem], str]]:
    """The name of every source, its rows, and the setting that names it."""
    for source, own in problems.items():
        data = config.data.parts[source]
        yield source, own, f"data.eval_source={data.held_out}" if evaluation else f"data.source={data.source}"


def _where(lacking: dict[int, str], sets: Needs, problems: list[Problem], label: str) -> str:
    """What is missing (by row), from which rows, and what is there."""
    columns = dict.fromkeys(column for each in problems for column in each.columns if column not in NOT_GIVEN)
    named = next(iter(lacking.values()))
    others = "".join(f" (or {' and '.join(one)})" for one in sets[1:])
    hint = "; data.answer_field names the field that holds it" if named == "answer" else ""
    which = f"which no row of {label} has"
    if len(lacking) < len(problems):
        which = f"which {len(lacking)} of {len(problems)} rows of {label} lack (rows {first_rows(list(lacking))})"
    return f"{named!r}{others}, {which}; the columns are {', '.join(columns) or 'none'}{hint}"


def _missing(name: str, sets: Needs, columns: dict[str, Any]) -> str:
    """The first column that a row lacks of the first set, or "" where one set is whole."""
    if kind_of(name) in ("rule", "judge"):  # to them null is as good as nothing
        there = {column for column, value in columns.items() if value is not None}
    else:
        there = columns.keys() - set(NOT_GIVEN)
    if not sets or any(there.issuperset(one) for one in sets):
        return ""
    return next(column for column in sets[0] if column not in there)
