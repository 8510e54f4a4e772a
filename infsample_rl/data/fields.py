"""Rows into problems: which field is the question, which the answer, and whether both can be used. Standard library
only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from infsample_rl.data.boxed import RAW_ANSWER, last_boxed
from infsample_rl.data.rows import Row, json_type, report_bad_rows

PROMPT_FIELDS = ("question", "problem", "prompt", "quiz")
# looked at when none of the above is there
FALLBACK_PROMPT_FIELDS = ("query", "instruction", "input", "messages", "text")
ANSWER_FIELDS = (
    ("answer",),
    ("ground_truth",),
    ("solution", "final_answer", "expected_answer", "correct_answer", "target"),
)
VERL_ANSWER = "reward_model.ground_truth"
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One usable row of a source, before the chat template.

    Example: Problem(row=3, origin="train.jsonl", messages=[{"role": "user", "content": "1 + 1 = ?"}],
    columns={"answer": "2"})
    """

    row: int  # from 1; in JSON Lines the line
    origin: str  # file or hub name, for messages to the user
    messages: list[dict[str, str]]
    columns: dict[str, Any]  # every field but the question; `answer` is the gold answer alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """Where a row keeps its question and its answer; a dot descends ("reward_model.ground_truth")."""

    prompt: str
    answer: str | None


class BadRow(ValueError):
    """A row that cannot be used; the message goes on after "row N"."""


def to_problems(rows: list[Row], fields: Fields, *, origin: str, label: str, bad_rows: str) -> list[Problem]:
    """The usable rows as problems. `label` opens every message; `bad_rows` is data.bad_rows ("error" or "skip")."""
    problems, faults = [], []
    for row in rows:
        try:
            problems.append(_to_problem(row, fields, origin))
        except BadRow as error:
            faults.append((row.number, str(error)))
    report_bad_rows(faults, len(rows), label, bad_rows)
    return problems


def find_fields(rows: list[Row], prompt_field: str | None, answer_field: str | None, label: str) -> Fields:
    """The fields a user named, or else the ones found; ValueError lists what there is when none or several could be
    meant."""
    dicts = [row.fields for row in rows if row.fields is not None]
    names = list(dict.fromkeys(name for fields in dicts for name in fields))
    if not names:  # no row has fields: to_problems names the first of them
        return Fields(prompt=prompt_field or "question", answer=answer_field)
    listed = f"the fields are {', '.join(names)}"
    for option, field in (("data.prompt_field", prompt_field), ("data.answer_field", answer_field)):
        if field is not None and all(lookup(fields, field) is None for fields in dicts):
            raise ValueError(f"{label}: no row has the field {option}={field}; {listed}")
    return Fields(
        prompt=prompt_field or _find_prompt(dicts, names, f"{label}: {listed}"),
        answer=answer_field or _find_answer(dicts, names, f"{label}: {listed}"),
    )


def _find_prompt(dicts: list[dict[str, Any]], names: list[str], message: str) -> str:
    # verl's and TRL's chat layout: nothing else can be meant
    if any(isinstance(fields.get("prompt"), list) for fields in dicts):
        return "prompt"
    for tier in (PROMPT_FIELDS, FALLBACK_PROMPT_FIELDS):
        found = [name for name in tier if name in names]
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(
                f"{message}; {' and '.join(found)} could each be the question: set data.prompt_field, e.g. "
                f"data.prompt_field={found[0]}"
            )
    known = ", ".join(PROMPT_FIELDS)
    raise ValueError(
        f"{message}; none is known to be the question ({known}): set data.prompt_field, e.g. "
        f"data.prompt_field={names[0]}"
    )


def _find_answer(dicts: list[dict[str, Any]], names: list[str], message: str) -> str | None:
    """None when nothing looks like an answer: a reward model needs none."""
    if any(lookup(fields, VERL_ANSWER) is not None for fields in dicts):
        return VERL_ANSWER
    for tier in ANSWER_FIELDS:
        found = [name for name in tier if name in names]
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(
                f"{message}; {' and '.join(found)} could each be the answer: set data.answer_field, e.g. "
                f"data.answer_field={found[0]}"
            )
    return None


def lookup(fields: dict[str, Any], name: str) -> Any:
    """The value of a field, descending at dots; None when it is not there."""
    if name in fields:
        return fields[name]
    value: Any = fields
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def _to_problem(row: Row, fields: Fields, origin: str) -> Problem:
    if row.fields is None:
        raise BadRow(row.fault)
    messages = read_messages(_required(row.fields, fields.prompt), fields.prompt)
    # A prompt of chat messages stays a column: TRL's reward functions then get completions as messages too.
    columns = {name: value for name, value in row.fields.items() if name != fields.prompt or isinstance(value, list)}
    # verl: what its compute_score takes
    if isinstance(columns.get("reward_model"), dict) and "ground_truth" in columns["reward_model"]:
        columns.setdefault("ground_truth", columns["reward_model"]["ground_truth"])
        columns.setdefault("data_source", None)
        columns.setdefault("extra_info", None)
    if fields.answer is not None:
        own, gold = row.fields.get("answer"), gold_answer(_required(row.fields, fields.answer), fields.answer)
        columns["answer"] = gold
        if own is not None and gold != (own.strip() if isinstance(own, str) else own):
            columns[RAW_ANSWER] = own
            if fields.answer == "answer" and isinstance(own, str):
                columns.setdefault("solution", own)  # the worked solution the gold answer was cut from
    return Problem(row=row.number, origin=origin, messages=messages, columns=columns)


def _required(fields: dict[str, Any], name: str) -> Any:
    value = lookup(fields, name)
    if value is None:
        state = "is null" if name in fields else "is missing"
        raise BadRow(f"cannot be used: its field {name!r} {state} (it has {', '.join(fields) or 'no fields'})")
    return value


def read_messages(value: Any, name: str) -> list[dict[str, str]]:
    """Chat messages from a question (string) or from a list of messages; BadRow when it is neither, or empty."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    elif not isinstance(value, list):
        raise BadRow(
            f"cannot be used: its field {name!r} is {json_type(value)}; a string or a list of chat messages is needed"
        )
    messages = [_read_message(message, name) for message in value]
    users = [message for message in messages if message["role"] == "user"]
    if not users or not users[-1]["content"].strip():
        raise BadRow(f"cannot be used: its field {name!r} is empty")
    if messages[-1]["role"] == "assistant":
        raise BadRow(
            f"cannot be used: its field {name!r} ends with a message of the assistant; the last one must be the user's"
        )
    return messages


def _read_message(message: Any, name: str) -> dict[str, str]:
    where = f"cannot be used: its field {name!r}"
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        raise BadRow(f"{where} holds {json_type(message)} where a message {{role, content}} is needed")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise BadRow(f"{where} holds a message of role {role!r}; the roles are {', '.join(ROLES)}")
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRow(f"{where} holds a message whose content is {json_type(content)}; text is needed")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:  # a lone surrogate, which JSON can spell and no tokenizer takes
        raise BadRow(
            f"{where} holds text that is not valid Unicode ({error.reason} at character {error.start})"
        ) from error
    return {"role": role, "content": content}


def gold_answer(value: Any, name: str) -> Any:
    r"""The gold answer alone: what follows GSM8K's last `####` (commas removed), MATH's last \boxed{...}, a number as
    text.

    gold_answer("6 * 7 = 42\n#### 1,042", "answer") == "1042"; lists and objects stay as they are.
    """
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadRow(f"cannot be used: its field {name!r} is {value}, no number")
        return str(int(value)) if value.is_integer() else format(Decimal(repr(value)), "f")  # 0.00001, not 1e-05
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        return value
    _, mark, tail = value.rpartition("####")
    if mark and "\n" not in tail.strip():  # else it is a heading
        answer = tail.strip().replace(",", "")
    else:
        boxed = last_boxed(value)
        answer = (value if boxed is None else boxed).strip()
    if not answer:
        raise BadRow(f"cannot be used: its field {name!r} holds no answer")
    return answer
