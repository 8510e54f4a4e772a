"""The command of a shell script, as words: variables, arrays, ${NAME:-default} and $((arithmetic)) resolved, nothing
executed.

What only a shell could know, a command's output or an unset variable, stays in the word as it is written;
is_unresolved() finds it.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+|declare\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)(\+?)=")
_REDIRECTION = re.compile(r"(?:\d+|&)?(?:>>|>\||>|<<<|<)[ \t]*&?[ \t]*")  # 2>&1, > FILE, &>> FILE
_QUOTED_ARRAY = re.compile(r'"\$\{(\w+)\[@\]\}"')  # the only quoted expansion that gives several words
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
# ${NAME or ${NAME[@] or ${NAME:-, before the word that } ends
_BRACED = re.compile(r"\$\{(?:(\w+)(\[[@*]\])?(?::?([-=?+]))?)?")
_UNRESOLVED = re.compile(r"\$[({A-Za-z_@*#0-9]|`")


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command and its line. Example: Word(text="data.train_batch_size=64", line=12)"""

    text: str
    line: int


@dataclass(slots=True)
class _Reader:
    text: str
    variables: dict[str, str | list[str]]
    at: int = 0
    words: list[Word] = field(default_factory=list)
    has_branches: bool = False

    @property
    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1


def read_commands(
    text: str, environment: Mapping[str, str], *, keep: Callable[[list[str]], bool]
) -> tuple[list[list[Word]], bool]:
    """The commands whose words `keep` accepts, and whether the script branches or loops: all its branches are read, in
    order."""
    reader, found = _Reader(text, dict(environment)), []
    while reader.at < len(text):
        words = _statement(reader)
        texts = [word.text for word in words]
        if texts and texts[0] in ("if", "for", "while", "case", "elif", "else", "until"):
            reader.has_branches = True
        if keep(texts):
            found.append(words)
    return found, reader.has_branches


def is_unresolved(value: object) -> bool:
    """Whether a text, or one in a list or a dict, holds something that only a shell could resolve."""
    if isinstance(value, (list, dict)):
        return any(map(is_unresolved, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and _UNRESOLVED.search(value) is not None


def _statement(reader: _Reader) -> list[Word]:
    """Words up to the end of a statement; assignments are kept as variables instead."""
    words: list[Word] = []
    text = reader.text
    while reader.at < len(text):
        character = text[reader.at]
        if character == "\\" and text[reader.at + 1 : reader.at + 2] == "\n":
            reader.at += 2
        elif character in " \t\r":
            reader.at += 1
        elif character == "#":
            _skip_comment(reader)
        elif found := _REDIRECTION.match(text, reader.at):
            reader.at = found.end()
            _word(reader)  # where to; no word of the command
        elif character in "\n;&|":
            reader.at += 1
            return words
        elif not words and (found := _ASSIGNMENT.match(text, reader.at)):
            _assign(reader, found)
        else:
            start = reader.at
            words += [word for word in _word(reader) if word.text]
            reader.at = max(reader.at, start + 1)
    return words


def _skip_comment(reader: _Reader) -> None:
    end = reader.text.find("\n", reader.at)
    reader.at = len(reader.text) if end < 0 else end


def _assign(reader: _Reader, found: re.Match[str]) -> None:
    """NAME=value, NAME+=value, NAME=(values)."""
    name, adds = found[1], bool(found[2])
    reader.at = found.end()
    if reader.text[reader.at : reader.at + 1] == "(":
        reader.at += 1
        values = _array(reader)
        before = reader.variables.get(name, [])
        reader.variables[name] = (before if isinstance(before, list) else [before]) + values if adds else values
        return
    value = "".join(word.text for word in _word(reader, splits=False))
    before = reader.variables.get(name, "")
    reader.variables[name] = (before if isinstance(before, str) else " ".join(before)) + value if adds else value


def _array(reader: _Reader) -> list[str]:
    values: list[str] = []
    while reader.at < len(reader.text):
        character = reader.text[reader.at]
        if character == ")":
            reader.at += 1
            break
        if character == "#":
            _skip_comment(reader)
        elif character in " \t\r\n" or reader.text.startswith("\\\n", reader.at):
            reader.at += 1
        else:
            values += [word.text for word in _word(reader, ends=" \t\r\n)")]
    return values


def _word(reader: _Reader, *, ends: str = " \t\r\n;&|<>", splits: bool = True, in_quotes: bool = False) -> list[Word]:
    """One word of the source; an unquoted variable may be several words of the command, or none. `in_quotes`: the word
    of "${NAME:-it's}"."""
    line, parts, current, quoted = reader.line, [], "", False
    text = reader.text
    while reader.at < len(text) and text[reader.at] not in ends:
        character = text[reader.at]
        if character == "$" and text[reader.at + 1 : reader.at + 2] in ("'", '"'):  # $'...' and $"..."
            reader.at += 1
        elif character == "\\":
            current += text[reader.at + 1 : reader.at + 2].replace("\n", "")
            reader.at += 2
        elif character == "'" and not in_quotes:
            end = text.find("'", reader.at + 1)
            end = len(text) if end < 0 else end
            current, quoted, reader.at = current + text[reader.at + 1 : end], True, end + 1
        elif (
            (found := _QUOTED_ARRAY.match(text, reader.at))
            and not current
            and isinstance(reader.variables.get(found[1]), list)
        ):
            parts += reader.variables[found[1]]
            reader.at = found.end()
        elif character == '"':
            current, quoted = current + _double_quoted(reader), True
        elif character in "$`":
            value = _expansion(reader, in_quotes=in_quotes)
            whole = value if isinstance(value, list) else [value]
            pieces = [
                piece for item in whole for piece in (item.split() if splits and not is_unresolved(item) else [item])
            ]
            if pieces:
                parts += [current + pieces[0], *pieces[1:]][:-1] if len(pieces) > 1 else []
                current = pieces[-1] if len(pieces) > 1 else current + pieces[0]
        else:
            current += character
            reader.at += 1
    if current or quoted:
        parts.append(current)
    return [Word(part, line) for part in parts]


def _double_quoted(reader: _Reader) -> str:
    found = ""
    reader.at += 1
    text = reader.text
    while reader.at < len(text) and text[reader.at] != '"':
        if text[reader.at] == "\\" and text[reader.at + 1 : reader.at + 2] in ('"', "\\", "$", "`", "\n"):
            found += text[reader.at + 1].replace("\n", "")
            reader.at += 2
        elif text[reader.at] in "$`":
            value = _expansion(reader, in_quotes=True)
            found += " ".join(value) if isinstance(value, list) else value
        else:
            found += text[reader.at]
            reader.at += 1
    reader.at += 1
    return found


def _expansion(reader: _Reader, *, in_quotes: bool) -> str | list[str]:
    """What a $ or a backquote stands for; itself where only a shell could say."""
    text, start = reader.text, reader.at
    if text.startswith("$((", start):
        reader.at = _closing(text, start)
        return _arithmetic(text[start + 3 : reader.at - 2], reader.variables) or text[start : reader.at]
    if text.startswith("$(", start) or text[start] == "`":
        reader.at = _closing(text, start)
        return _path_command(text[start + 2 : reader.at - 1], reader.variables) or text[start : reader.at]
    if braced := _BRACED.match(text, start):
        return _parameter(reader, braced, in_quotes=in_quotes)
    found = re.compile(r"\$([A-Za-z_]\w*|0)|\$[@*#1-9]").match(text, start)
    reader.at = start + 1 if found is None else found.end()
    if found is None:
        return text[start]
    # "$@": the script's own arguments, which come after it
    return [] if found[1] is None else _first(reader.variables.get(found[1], found[0]))


def _parameter(reader: _Reader, braced: re.Match[str], *, in_quotes: bool) -> str | list[str]:
    """What ${NAME}, ${NAME[@]}, ${NAME:-default}, ${NAME:=default} or ${NAME:+other} stands for; itself where only a
    shell could say."""
    name, has_index, operation = braced.groups()
    reader.at = braced.end()
    other = " ".join(word.text for word in _word(reader, ends="}", splits=False, in_quotes=in_quotes))
    reader.at += 1
    value = reader.variables.get(name)
    if operation == "+":
        return other if value else ""
    if operation in ("-", "=") and not value:
        if operation == "=":
            reader.variables[name] = other
        return other
    if value is None or (other and not operation):  # ${NAME:?message} of an unset one, ${NAME%suffix}
        return reader.text[braced.start() : reader.at]
    return value if has_index else _first(value)


def _first(value: str | list[str]) -> str:
    """What an array's name alone stands for."""
    return value if isinstance(value, str) else value[0] if value else ""


def _path_command(text: str, variables: dict[str, str | list[str]]) -> str:
    """What dirname PATH, basename PATH [SUFFIX], pwd or cd PATH && pwd would print; "" for every other command."""
    reader = _Reader(text, variables)
    words = [[word.text for word in _statement(reader)]]
    while reader.at < len(text):
        words.append([word.text for word in _statement(reader)])
    words = [found for found in words if found]
    if any(is_unresolved(word) for found in words for word in found):
        return ""
    match words:
        case [["dirname", path]]:
            return os.path.dirname(path) or "."
        case [["basename", path, *suffix]]:
            return os.path.basename(path.rstrip("/")).removesuffix(suffix[0] if suffix else "")
        case [["pwd"]]:
            return os.getcwd()
        case [["cd", path], ["pwd"]]:
            return os.path.abspath(path)
    return ""


def _inner(text: str, variables: dict[str, str | list[str]]) -> str:
    """A text with its variables resolved."""
    return "".join(word.text for word in _word(_Reader(text, variables), splits=False, ends=""))


def _closing(text: str, start: int) -> int:
    """The position behind $(...) or `...`."""
    if text[start] == "`":
        end = text.find("`", start + 1)
        return len(text) if end < 0 else end + 1
    depth = 0
    for position in range(start + 1, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position + 1
    return len(text)


def _arithmetic(text: str, variables: dict[str, str | list[str]]) -> str:
    """The value of whole numbers, names, + - * / % ** and brackets; "" for anything else."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = value(node.left), value(node.right)
            # a fraction, or far beyond a shell's 64 bits
            if isinstance(node.op, ast.Pow) and not 0 <= left.bit_length() * right <= 128:
                raise ValueError(text)
            return _OPERATORS[type(node.op)](left, right)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            return int(str(variables[node.id]))
        raise ValueError(text)

    try:
        return str(value(ast.parse(_inner(text, variables).strip(), mode="eval").body))
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return ""


def read_flags(words: list[Word]) -> tuple[dict[str, tuple[object, int]], list[Word]]:
    """Flags as argparse reads them, {name: (value, line)}, and the words that belong to none.

    --name value, --name=value, --name a b c (a list), --name (True); texts are not yet read as numbers.
    """
    flags: dict[str, tuple[object, int]] = {}
    others: list[Word] = []
    name: str | None = None
    for word in words:
        if word.text.startswith("--") and len(word.text) > 2:
            name, equals, value = word.text[2:].partition("=")
            flags[name] = (value if equals else True, word.line)
            name = None if equals else name
        elif name is None:
            others.append(word)
        else:
            before, line = flags[name]
            flags[name] = (
                word.text
                if before is True
                else [*before, word.text]
                if isinstance(before, list)
                else [before, word.text],
                line,
            )
    return flags, others
