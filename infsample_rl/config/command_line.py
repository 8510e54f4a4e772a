"""What the commands share: `key=value` arguments read into a dataclass, help, exit codes, errors in one line, tables.
Standard library only."""

from __future__ import annotations

import dataclasses
import difflib
import os
import signal
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from infsample_rl.config.fields import default_of, out_of_bounds, setting

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")

option = setting  # an argument of a command has the meaning, bounds and choices of a setting, and maybe another `key`


def parse(arguments: list[str], options: type[Options]) -> Options:
    """The options of `key=value` arguments. ValueError, in one line with the keys that exist, for an unknown key or a
    bad value."""
    fields = {field.metadata["key"] or field.name: field for field in dataclasses.fields(options)}
    hints = typing.get_type_hints(options)
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if key not in fields or not equals:
            nearest = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {nearest[0]}=...? " if nearest and key not in fields else ""
            raise ValueError(f"{argument!r} is not key=value with a key that exists: {hint}keys: {', '.join(fields)}")
        field = fields[key]
        try:
            values[field.name] = _convert(text, hints[field.name])
        except ValueError as error:
            raise ValueError(f"{key}={text}: {error}; keys: {', '.join(fields)}") from None
        must, hint = out_of_bounds(values[field.name], field.metadata)
        if must:
            raise ValueError(f"{key}={text}: {must}{hint}; keys: {', '.join(fields)}")
    return options(**values)


def parse_with_settings(arguments: list[str], options: type[Options]) -> tuple[Options, list[str]]:
    """The options among `key=value` arguments, and the others, settings of a run for Hydra. ValueError as parse()."""
    names = {field.metadata["key"] or field.name for field in dataclasses.fields(options)}
    for key in (argument.partition("=")[0] for argument in arguments if "=" in argument):
        nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.75)
        if nearest and key not in names and "." not in key:
            raise ValueError(
                f"{key} is no argument; did you mean {nearest[0]}=...? arguments: {', '.join(sorted(names))}, and "
                "settings of a run"
            )
    own = [argument for argument in arguments if argument.partition("=")[0] in names or "=" not in argument]
    return parse(own, options), [argument for argument in arguments if argument not in own]


def run_command(command: Callable[[list[str]], int], arguments: list[str] | None, *, usage: str) -> int:
    """Run a command with its arguments, those of this process if None; -h prints `usage`. Returns the exit code: what
    `command` returns, 2 when it raises ValueError (an input is wrong), 1 for OSError, RuntimeError and MemoryError (it
    failed), each said in one line on stderr, 130 when Ctrl-C ends it and, without a word, 141 when nobody reads its
    output any more (`| head`)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(usage)
        return 0
    try:
        status = command(arguments)
        sys.stdout.flush()  # here, where a reader that is gone is noticed, not while Python ends
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        print(f"error: {' '.join(str(error).split()) or 'out of memory'}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


def run_with_options(
    command: Callable[[Options], int], options: type[Options], arguments: list[str] | None = None, *, usage: str
) -> int:
    """run_command() of a command whose arguments are `options` alone: -h prints these too."""
    lines = [f"  {name:<20} {meaning} ({default})" for name, default, meaning in describe(options)]
    return run_command(
        lambda given: command(parse(given, options)), arguments, usage="\n".join([usage.strip(), "", *lines])
    )


def describe(options: type[Any]) -> list[tuple[str, str, str]]:
    """(name, default, meaning) of every option, as one would type them."""
    rows = []
    for field in dataclasses.fields(options):
        value = default_of(field)
        # one that depends on the machine is told in words
        doc, _, told = field.metadata["doc"].partition("; default: ")
        shown = f"[{','.join(map(str, value))}]" if isinstance(value, list) else "none" if value is None else str(value)
        rows.append(
            (field.metadata["key"] or field.name, told or (shown.lower() if isinstance(value, bool) else shown), doc)
        )
    return rows


def check_writable(folder: Path, name: str) -> None:
    """Make `folder`, unless it is there. ValueError, naming the argument `name`, when it cannot be made or written
    to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{name}: the folder {folder} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{name}: the folder {folder} cannot be written to")


def print_table(records: list[dict[str, Any]], columns: dict[str, str]) -> None:
    """A plain table on stdout: `columns` are keys of the records, with their headings; '-' where there is no value."""
    rows = [list(columns.values())]
    rows += [["-" if record[name] is None else str(record[name]) for name in columns] for record in records]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]).rstrip())


def _convert(text: str, kind: Any) -> Any:
    """`text` as a value of type `kind`: str, bool, int, float, a list of one of them ([a,b]), or one of them or None
    (none)."""
    if isinstance(kind, types.UnionType):
        return None if text.lower() in ("none", "null") else _convert(text, typing.get_args(kind)[0])
    if typing.get_origin(kind) is list:
        inner = text.strip().removeprefix("[").removesuffix("]")
        return [_convert(item.strip(), typing.get_args(kind)[0]) for item in inner.split(",") if item.strip()]
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError("must be true or false")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"must be {'a whole number' if kind is int else 'a number'}") from None
