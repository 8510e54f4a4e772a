"""The table of metrics has every name that the package's sources write, and nothing that no source knows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from infsample_rl.observe.metric_names import GROUPS, METRICS
from tests.observe.logged import undescribed

PACKAGE = Path(__file__).resolve().parents[2] / "infsample_rl"
A_NAME = re.compile(rf"(?:{'|'.join(GROUPS)})(?:/[^/\s.]*[\w}}]){{1,2}}")  # not the beginning of a composed one


def names_in(path: Path) -> set[str]:
    """Texts of a source that look like metrics; what an f-string fills in is {}."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            found.add("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return {name for name in found if A_NAME.fullmatch(name)}


def written() -> set[str]:
    """Names in every source but the table itself, and the benchmarks, which have names of their own."""
    paths = [path for path in PACKAGE.rglob("*.py") if path.name != "metric_names.py" and "bench" not in path.parts]
    return set().union(*map(names_in, paths))


def test_every_metric_that_a_source_names_has_unit_and_meaning():
    found = {name.replace("{}", "x") for name in written()}
    assert "learner/loss" in found and "eval/mean@x" in found, "the search finds what there is"
    assert undescribed(found) == []


def test_every_metric_of_the_table_is_written_by_a_source():
    found = written()
    missing = {name for name in METRICS if re.sub("<.*?>", "{}", name) not in found}
    assert missing == set()
