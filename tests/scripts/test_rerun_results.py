"""The commands of a page of results: found, completed, run in order until one fails."""

import importlib.util
import re
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "rerun_results.py"
PAGE = """# Speed
```
python -c "print('first', 'MODEL')" model=MODEL     # with MODEL for one
python -c "import sys; sys.exit(3)"
python -c "print('never')"
```
Text.
```json
{"python": 1}
```
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("rerun_results", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "speed.md").write_text(PAGE)
    monkeypatch.setattr(module, "RESULTS", tmp_path)

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["rerun_results.py", *arguments])
        return module.main()

    return run


def test_commands_run_in_order_with_what_is_given_until_one_fails(script, capfd):
    assert script("speed", "MODEL=/my/model") == 3
    said = capfd.readouterr().out
    assert "first MODEL" in said and "model=/my/model" in said and "never" not in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["speed"], "error: speed needs MODEL=..."),
        (["speed", "MODEL=x", "FOLDER=y"], "error: FOLDER is not in the commands of speed, which need MODEL"),
        (["sped"], "error: sped has no commands; pages that have: speed"),
    ],
)
def test_what_is_missing_or_wrong_is_one_line(script, capfd, arguments, said):
    assert script(*arguments) == 2
    assert capfd.readouterr().err.strip() == said


def test_every_written_page_of_results_has_commands():
    spec = importlib.util.spec_from_file_location("rerun_results", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    without = {path.stem for path in module.RESULTS.glob("*.md") if not module.commands_of(path)}
    assert without == {"gpu", "paper_tables"}, "written by `make gpu-evidence` and `make tables`"
    commands = [command for path in module.RESULTS.glob("*.md") for command in module.commands_of(path)]
    left = [command for command in commands if re.search(r"\b[A-Z]{3,}\b", module.OPEN.sub("given", command))]
    assert not left, "every word that a command leaves open can be given"
