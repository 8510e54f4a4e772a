"""Imports point one way, between packages and inside them; Ray is imported in one; and what a GPU image may lack is
never needed.

An allow list by rank: an import is right only if it goes down. Lazy imports and those under TYPE_CHECKING count.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RANKS = {
    "__init__": 0,
    "assets": 0,
    "types": 1,
    "config": 2,
    "observe": 3,
    "model": 4,
    "data": 5,
    "rollout": 6,
    "reward": 6,
    "learner": 6,
    "plan": 7,
    "cluster": 8,
    "controller": 9,
    "commands": 10,
    "main": 11,
    "__main__": 12,
}
# python -m infsample_rl.NAME runs commands/NAME.py
SHORT_NAMES = {"simulate": "commands", "chaos": "commands", "evaluate": "commands", "plan.__main__": "commands"}


def modules_under(root: Path) -> dict[str, Path]:
    """Files by module name: infsample_rl.rollout.worker; a package by its __init__."""
    found = {}
    for path in sorted((root / "infsample_rl").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path, modules: dict[str, Path]) -> set[str]:
    """Names of the modules a file imports, at its top, inside a function or for the type checker."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in full}
    return found


def room_of(module: str) -> str:
    """infsample_rl.rollout.worker -> rollout; infsample_rl -> __init__; infsample_rl.simulate -> commands."""
    name = module.partition(".")[2]
    return SHORT_NAMES.get(name, name.partition(".")[0] or "__init__")


def wrong_directions(root: Path) -> list[str]:
    """Imports that do not go from a higher rank to a lower one, and files whose package has no rank."""
    modules, wrong = modules_under(root), []
    for name, path in modules.items():
        if room_of(name) not in RANKS:
            wrong.append(f"{name}: {room_of(name)} has no rank")
            continue
        for imported in imports_of(path, modules):
            if imported.split(".")[0] != "infsample_rl" or room_of(imported) == room_of(name):
                continue
            if RANKS.get(room_of(imported), 99) >= RANKS[room_of(name)]:
                wrong.append(f"{name} imports {imported}")
    return sorted(wrong)


def circle(root: Path) -> list[str]:
    """Modules that import each other, over any number of others, if there are any."""
    modules = modules_under(root)
    try:
        TopologicalSorter({name: imports_of(path, modules) - {name} for name, path in modules.items()}).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def importers_of(package: str, root: Path) -> set[str]:
    """Rooms whose files import a package that is not ours."""
    modules = modules_under(root)
    return {
        room_of(name)
        for name, path in modules.items()
        if any(item.split(".")[0] == package for item in imports_of(path, modules))
    }


def test_imports_between_packages_go_down():
    assert wrong_directions(ROOT) == []


def test_no_two_files_import_each_other():
    assert circle(ROOT) == []


def test_only_cluster_imports_ray():
    assert importers_of("ray", ROOT) == {"cluster"}


def test_only_config_imports_hydra_and_omegaconf():
    assert importers_of("hydra", ROOT) | importers_of("omegaconf", ROOT) == {"config"}


def test_the_package_never_imports_the_benchmarks():
    assert importers_of("benchmarks", ROOT) == set()


@pytest.fixture
def house(tmp_path) -> Path:
    """A small house with no fault: commands on controller on cluster."""
    files = {
        "__init__.py": "",
        "types.py": "",
        "cluster/__init__.py": "",
        "cluster/cluster.py": "import ray\nfrom infsample_rl import types\n",
        "controller/__init__.py": "",
        "controller/driver.py": "from infsample_rl.cluster import cluster\n",
    }
    for name, text in files.items():
        path = tmp_path / "infsample_rl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert (wrong_directions(tmp_path), circle(tmp_path), importers_of("ray", tmp_path)) == ([], [], {"cluster"})
    return tmp_path / "infsample_rl"


@pytest.mark.parametrize(
    "text",
    [
        "from infsample_rl.controller import driver\n",
        "def late():\n    import infsample_rl.controller.driver\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from infsample_rl.controller.driver import Driver\n",
    ],
    ids=["at the top", "lazily", "for the type checker"],
)
@pytest.mark.parametrize("name", ["up", "__main__"])
def test_an_import_that_goes_up_is_found(house, name, text):
    (house / "cluster" / f"{name}.py").write_text(text)
    assert wrong_directions(house.parent) == [f"infsample_rl.cluster.{name} imports infsample_rl.controller.driver"]


def test_siblings_that_meet_are_found(house):
    for room, text in (("rollout", ""), ("learner", "from infsample_rl.rollout import worker\n")):
        (house / room).mkdir()
        (house / room / "__init__.py").write_text("")
        (house / room / "worker.py").write_text(text)
    assert wrong_directions(house.parent) == ["infsample_rl.learner.worker imports infsample_rl.rollout.worker"]


def test_a_package_without_a_rank_is_found(house):
    (house / "helpers").mkdir()
    (house / "helpers" / "__init__.py").write_text("")
    assert wrong_directions(house.parent) == ["infsample_rl.helpers: helpers has no rank"]


def test_two_files_that_import_each_other_are_found(house):
    (house / "cluster" / "a.py").write_text("from infsample_rl.cluster import b\n")
    (house / "cluster" / "b.py").write_text("def late():\n    from infsample_rl.cluster.a import x\n")
    assert set(circle(house.parent)) == {"infsample_rl.cluster.a", "infsample_rl.cluster.b"}


def test_ray_outside_of_cluster_is_found(house):
    (house / "controller" / "asks.py").write_text("def late():\n    from ray.util import state\n")
    assert importers_of("ray", house.parent) == {"cluster", "controller"}


PURE = [
    *(
        "config",
        "types",
        "observe.phases",
        "observe.timeline",
        "observe.health",
        "observe.report",
        "commands.chaos",
        "commands.simulate",
    ),
    *(
        "rollout.schedule",
        "rollout.simulator",
        "learner.row_plan",
        "learner.advantage",
        "controller.groups",
    ),
    *(
        "cluster.dealing",
        "plan.placement",
        "model.weight_sync.transport",
        "model.hub",
    ),
    "reward.peer_forms",
]


@pytest.mark.parametrize("name", PURE)
def test_pure_files_have_no_tensors(name):
    """What decides and counts works on ints and lists."""
    modules = modules_under(ROOT)
    files = [
        module for module in modules if module == f"infsample_rl.{name}" or module.startswith(f"infsample_rl.{name}.")
    ]
    assert files
    wrong = {
        module: item
        for module in files
        for item in imports_of(modules[module], modules)
        if item.split(".")[0] in ("torch", "transformers")
    }
    assert wrong == {}


def test_engine_and_learner_import_without_ray_hydra_omegaconf_and_deepspeed():
    block = "import sys; [sys.modules.__setitem__(name, None) for name in ('ray', 'hydra', 'omegaconf', 'deepspeed')];"
    workers = ("rollout.worker", "learner.worker", "learner.reference", "reward.worker")
    code = block + "".join(f"import infsample_rl.{name};" for name in workers)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
