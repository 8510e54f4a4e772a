"""Write docs/reference/: every setting, metric and command, from the code itself: python scripts/write_reference.py
[--check]

--check   write nothing; exit code 1 if a page is not what the code says
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

from infsample_rl.__main__ import COMMANDS
from infsample_rl.config.command_line import describe
from infsample_rl.config.data import DataSourceConfig
from infsample_rl.config.fields import default_of
from infsample_rl.config.overrides import SECTIONS, config_folder
from infsample_rl.config.reward import JudgeConfig, RewardFunctionConfig
from infsample_rl.observe.metric_names import GROUPS, METRICS

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
OUT = ROOT / "docs" / "reference"
WRITTEN = "Written by `python scripts/write_reference.py`; a test fails when it is not what the code says.\n"
ENTRIES = {  # of lists of settings, by section
    "data": [("An entry of `data.sources`", DataSourceConfig)],
    "reward": [
        ("An entry of `reward.functions`", RewardFunctionConfig),
        ("What the entry of the name `judge` has beside", JudgeConfig),
    ],
}
LAUNCHERS = ("local.sh", "submit.sh", "slurm.sbatch")
sys.path.insert(0, str(ROOT))  # benchmarks/ is no part of the installed package


def pages() -> dict[str, str]:
    """Name of every page and its text."""
    return {"settings.md": settings_page(), "metrics.md": metrics_page(), "commands.md": commands_page()}


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; what Markdown would read in cells is escaped."""
    lines = [columns, ("---",) * len(columns), *([_escaped(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _escaped(cell: str) -> str:
    """A bar ends a cell; a tag in plain text would be swallowed (in code it is shown)."""
    plain_and_code = cell.replace("|", "\\|").split("`")
    return "`".join(part if place % 2 else part.replace("<", "&lt;") for place, part in enumerate(plain_and_code))


def settings_page() -> str:
    """Every setting of the schema, section by section, then the groups of configs/."""
    parts = ["# Settings\n", WRITTEN]
    parts.append(
        "Given as `name=value` behind `python -m infsample_rl.main`, or in YAML of your own laid out like `configs/` "
        "(`--config-dir DIR`). "
        "In YAML `none` is written `null`. A value out of bounds, or one that contradicts another, is one line before "
        "anything starts; "
        "`python -m infsample_rl.main --cfg job` prints all settings as composed.\n"
    )
    columns = ("setting", "meaning", "type", "default", "bound")
    for name, section in SECTIONS.items():
        parts += [f"## {name}\n", (section.__doc__ or "").strip() + "\n", table(columns, _settings(name, section))]
        parts += [part for entry, schema in ENTRIES.get(name, ()) for part in (f"{entry}:\n", _entry(columns, schema))]
    parts += [
        "## Groups\n",
        "`GROUP=CHOICE` takes a whole file of `configs/GROUP/`, `+experiment=NAME` a whole run's:\n",
    ]
    parts.append(table(("group", "choices"), _groups()))
    return "\n".join(parts)


def _entry(columns: tuple[str, ...], schema: type) -> str:
    """The table of an entry's own keys; those of what it extends are in that one's."""
    above = {spec.name for base in schema.__mro__[1:-1] for spec in dataclasses.fields(base)}
    return table(columns, [row for row in _settings("", schema) if row[0].strip("`") not in above])


def _settings(section: str, schema: type) -> list[tuple[str, ...]]:
    return [
        (
            f"`{section}.{spec.name}`" if section else f"`{spec.name}`",
            spec.metadata["doc"],
            str(spec.type).replace(" | None", ""),
            _default(spec),
            _bound(spec),
        )
        for spec in dataclasses.fields(schema)
    ]


def _default(spec: dataclasses.Field[Any]) -> str:
    value = default_of(spec)
    if value is None:
        return "none"
    if value == "":
        return "(must be given)"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _bound(spec: dataclasses.Field) -> str:
    bound = spec.metadata
    texts = [
        f">= {bound['low']}" if bound["low"] is not None else "",
        f"> {bound['above']}" if bound["above"] is not None else "",
    ]
    texts += [
        f"<= {bound['high']}" if bound["high"] is not None else "",
        ", ".join(f"`{choice}`" for choice in bound["choices"]),
    ]
    return ", ".join(filter(None, texts))


def _groups() -> list[tuple[str, ...]]:
    folders = sorted(path for path in config_folder().iterdir() if path.is_dir() and list(path.glob("*.yaml")))
    return [
        (f"`{folder.name}`", ", ".join(f"`{path.stem}`" for path in sorted(folder.glob("*.yaml"))))
        for folder in folders
    ]


def metrics_page() -> str:
    """Every metric, group by group."""
    parts = ["# Metrics\n", WRITTEN]
    parts.append(
        "One JSON object a step in `metrics.jsonl`, and the same names in W&B, TensorBoard and MLflow (which takes no "
        "`@` and gets `_at_`). "
        "Where a step has no value (nobody was evaluated, no sample had a reward) the name is absent or null.\n"
    )
    for group, about in GROUPS.items():
        rows = [
            (f"`{name}`", metric.unit, metric.meaning)
            for name, metric in METRICS.items()
            if name.startswith(group + "/")
        ]
        parts += [f"## {group}\n", about + "\n", table(("metric", "unit", "meaning"), rows)]
    return "\n".join(parts)


def commands_page() -> str:
    """Every command with its own usage text; measurements and shell scripts apart."""
    parts = ["# Commands\n", WRITTEN]
    parts.append(
        "Exit codes, where nothing else is said: 0 done, 1 failed, 2 a setting or an input is wrong (one line says "
        "which).\n"
    )
    commands = [(name, ROOT / f"{module.replace('.', '/')}.py") for name, (module, _) in COMMANDS.items()]
    measurements = [(_module(path), path) for path in sorted(BENCHMARKS.glob("*.py")) if _is_command(path)]
    for name, path in [*commands, *measurements]:
        usage = _text(ast.get_docstring(ast.parse(path.read_text())) or "")
        parts += [f"## {name}\n", usage, *_arguments(path)]
    for path in sorted((ROOT / "scripts").glob("*.py")):
        usage = ast.get_docstring(ast.parse(path.read_text())) or ""
        if f"python scripts/{path.name}" in usage:
            parts += [f"## scripts/{path.name}\n", _text(usage)]
    for name in LAUNCHERS:
        comment = [
            line
            for line in (ROOT / "launch" / name).read_text().split("set -euo")[0].splitlines()[1:]
            if not line.startswith("#SBATCH")
        ]
        parts += [
            f"## launch/{name}\n",
            _text("\n".join(line.removeprefix("#").removeprefix(" ") for line in comment).strip()),
        ]
    return "\n".join(parts)


def _is_command(path: Path) -> bool:
    """A module that users start: it says how in its docstring. Those that other commands start answer with a record,
    not an exit code."""
    tree = ast.parse(path.read_text())
    mains = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    if mains and (mains[0].returns is None or ast.unparse(mains[0].returns) != "int"):
        return False
    return (
        f"python -m {_module(path)}" in (ast.get_docstring(tree) or "")
        and 'if __name__ == "__main__"' in path.read_text()
    )


def _module(path: Path) -> str:
    """What python -m takes."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")


def _text(text: str) -> str:
    return f"```text\n{text}\n```\n"


def _arguments(path: Path) -> list[str]:
    """The table of a command's key=value arguments, of the dataclass that its main parses them into."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    place = {"run_with_options": 1, "parse_with_settings": 1}  # of the dataclass among the call's arguments
    parsed = [
        call.args[place[call.func.id]] for call in calls if isinstance(call.func, ast.Name) and call.func.id in place
    ]
    if not parsed:
        return []
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    options: Any = getattr(importlib.import_module(module), ast.unparse(parsed[0]))
    rows = [(f"`{name}`", default.replace(f"{ROOT}/", ""), meaning) for name, default, meaning in describe(options)]
    return [table(("argument", "default", "meaning"), rows)]


def main() -> int:
    """Write the pages, or with --check compare them; 1 if one differs."""
    unknown = [argument for argument in sys.argv[1:] if argument != "--check"]
    if unknown:
        print(f"write_reference: {unknown[0]!r} is not an argument; there is --check", file=sys.stderr)
        return 2
    changed = {
        name: text for name, text in pages().items() if not (OUT / name).is_file() or (OUT / name).read_text() != text
    }
    if "--check" in sys.argv:
        for name in changed:
            print(
                f"docs/reference/{name} is not what the code says: python scripts/write_reference.py", file=sys.stderr
            )
        return 1 if changed else 0
    OUT.mkdir(parents=True, exist_ok=True)
    for name, text in changed.items():
        (OUT / name).write_text(text)
        print(f"written: docs/reference/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
