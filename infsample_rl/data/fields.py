"""Rows into problems: which field is the question, which the answer, and whether both can be used. Standard library
only."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from infsample_rl.data.rows import Row, json_type, report_bad_rows

# looked for in this order; two of one tier are ambiguous
PROMPT_FIELDS = (("question", "problem", "prompt", "quiz"), ("query", "instruction", "input", "messages", "text"))
ANSWER_FIELDS = (
    ("answer",),
    ("ground_truth",),
    ("solution", "final_answer", "expected_answer", "correct_answer", "target"),
)
VERL_ANSWER = "reward_model.ground_truth"
ROLES = ("system", "developer", "user", "assistant", "tool")
RAW_ANSWER = "answer_as_given"  # the column of a row's own `answer`, where the gold answer cut from it took its name


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One usable row of a source, before the chat template.

    Example: Problem(row=3, origin="train.jsonl", messages=[{"role": "user", "content": "1 + 1 = ?"}],
    columns={"question": "1 + 1 = ?", "answer": "2"})
    """

    row: int  # from 1; in JSON Lines the line
    origin: str  # file or hub name, for messages to the user
    messages: list[dict[str, Any]]
    columns: dict[str, Any]  # every field; `answer` is the gold answer alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """Where a row keeps its question and its answer; a dot descends ("reward_model.ground_truth")."""

    prompt: str
    answer: str | None
    may_lack_answer: bool = False  # the field of the answer was found, not named: who reads `answer` says what lacks it


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
    is_found, dicts = answer_field is None, [row.fields for row in rows if row.fields is not None]
    names = list(dict.fromkeys(name for fields in dicts for name in fields))
    if not names:  # no row has fields: to_problems names the first of them
        return Fields(prompt=prompt_field or "question", answer=answer_field)
    label = f"{label}: the fields are {', '.join(names)}"
    for option, field in (("data.prompt_field", prompt_field), ("data.answer_field", answer_field)):
        if field is not None and all(lookup(fields, field) is None for fields in dicts):
            raise ValueError(f"{label}; no row has the field {option}={field}")
    if prompt_field is None and any(isinstance(fields.get("prompt"), list) for fields in dicts):
        prompt_field = "prompt"  # verl's and TRL's chat layout: nothing else can be meant
    if answer_field is None and any(lookup(fields, VERL_ANSWER) is not None for fields in dicts):
        answer_field = VERL_ANSWER
    prompt_field = prompt_field or _find(PROMPT_FIELDS, names, f"{label}; %s the question: set data.prompt_field")
    if prompt_field is None:
        raise ValueError(
            f"{label}; none is known to be the question ({', '.join(PROMPT_FIELDS[0])}): set data.prompt_field"
        )
    # none that looks like an answer is no fault: a reward model needs none
    return Fields(
        prompt=prompt_field,
        answer=answer_field or _find(ANSWER_FIELDS, names, f"{label}; %s the answer: set data.answer_field"),
        may_lack_answer=is_found,
    )


def _find(tiers: tuple[tuple[str, ...], ...], names: list[str], message: str) -> str | None:
    """The one of `names` in the first tier that has any, None without one; ValueError for two."""
    found = next((found for tier in tiers if (found := [name for name in tier if name in names])), [])
    if len(found) > 1:
        raise ValueError(message % f"{' and '.join(found)} could each be")
    return found[0] if found else None


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
    columns = dict(row.fields)
    # verl: what its compute_score takes
    if isinstance(columns.get("reward_model"), dict) and "ground_truth" in columns["reward_model"]:
        columns = {"data_source": None, "extra_info": None, "ground_truth": lookup(columns, VERL_ANSWER)} | columns
    if fields.answer is not None and fields.may_lack_answer and lookup(row.fields, fields.answer) is None:
        columns.pop("answer", None)
    elif fields.answer is not None:
        own, gold = row.fields.get("answer"), gold_answer(_required(row.fields, fields.answer), fields.answer)
        columns["answer"] = gold
        if own is not None and gold != (own.strip() if isinstance(own, str) else own):
            columns[RAW_ANSWER] = own
            if fields.answer == "answer" and isinstance(own, str):
                columns.setdefault("solution", own)  # the worked solution the gold answer was cut from
    return Problem(row=row.number, origin=origin, messages=messages, columns=columns)


def as_given(columns: dict[str, Any]) -> dict[str, Any]:
    """A problem's columns as users' own code has them in the peers: `answer` is what the row itself holds."""
    if RAW_ANSWER not in columns:
        return columns
    others = {name: value for name, value in columns.items() if name != RAW_ANSWER}
    return others | {"answer": columns[RAW_ANSWER]}


def _required(fields: dict[str, Any], name: str) -> Any:
    value = lookup(fields, name)
    if value is None:
        state = "is null" if name in fields else "is missing"
        raise BadRow(f"cannot be used: its field {name!r} {state} (it has {', '.join(fields) or 'no fields'})")
    return value


def read_messages(value: Any, name: str) -> list[dict[str, Any]]:
    """Chat messages from a question (string) or from a list of messages; BadRow when it is neither, or empty."""
    where = f"cannot be used: its field {name!r}"
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    elif not isinstance(value, list):
        raise BadRow(f"{where} is {json_type(value)}; a string or a list of chat messages is needed")
    messages = [_read_message(message, where) for message in value]
    users = [message for message in messages if message["role"] == "user"]
    if not users or not users[-1]["content"].strip():
        raise BadRow(f"{where} is empty")
    if messages[-1]["role"] == "assistant":
        raise BadRow(f"{where} ends with a message of the assistant; the last one must be the user's")
    return messages


def _read_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        raise BadRow(f"{where} holds {json_type(message)} where a message {{role, content}} is needed")
    given = {name: value for name, value in message.items() if value is not None}  # Parquet fills up with null
    role, content = message["role"], given.get("content", "" if "tool_calls" in given else None)
    if role not in ROLES:
        raise BadRow(f"{where} holds a message of role {role!r}; the roles are {', '.join(ROLES)}")
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRow(f"{where} holds a message whose content is {json_type(content)}; text is needed")
    try:
        json.dumps(given, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError as error:  # a lone surrogate, which JSON can spell and no tokenizer takes
        raise BadRow(f"{where} holds text that is not valid Unicode ({error.reason})") from error
    return {**given, "role": role, "content": content}


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


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} or \fbox{...}, braces balanced; None without one.
    last_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"."""
    matches = list(re.finditer(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>[^\s{$]+))", text))
    if not matches:
        return None
    last = matches[-1]
    if last["bare"]:  # \boxed 5
        return last["bare"].rstrip(".,")
    depth = 1
    for position in range(last.end(), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0) if text[position - 1] != "\\" else 0
        if depth == 0:
            return text[last.end() : position].strip()
    return None
