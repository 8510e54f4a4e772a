"""docs/reference/ is what the code says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from infsample_rl.config.overrides import setting_names
from infsample_rl.observe.metric_names import METRICS

ROOT = Path(__file__).resolve().parents[2]
STALE = "not what the code says: python scripts/write_reference.py"


@pytest.fixture(scope="module")
def writer():
    """scripts/write_reference.py as a module."""
    spec = importlib.util.spec_from_file_location("write_reference", ROOT / "scripts" / "write_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(name: str) -> str:
    return (ROOT / "docs" / "reference" / name).read_text()


def test_settings_page_is_up_to_date_and_has_every_key(writer):
    assert page("settings.md") == writer.settings_page(), STALE
    assert [name for name in setting_names() if f"| `{name}` |" not in page("settings.md")] == []


def test_metrics_page_is_up_to_date_and_has_every_name(writer):
    assert page("metrics.md") == writer.metrics_page(), STALE
    assert [name for name in METRICS if f"| `{name}` |" not in page("metrics.md")] == []


def test_what_markdown_would_swallow_in_a_cell_is_escaped(writer):
    assert writer.table(("a", "b"), [("`x|<y>`", "<z>")]) == "| a | b |\n| --- | --- |\n| `x\\|<y>` | &lt;z> |\n"


def test_a_wrong_argument_is_one_line(writer, refused):
    assert refused(writer.main, "--chek") == "write_reference: '--chek' is not an argument; there is --check"


@pytest.mark.slow
def test_all_pages_are_up_to_date():
    """With the commands' own texts: it imports every benchmark."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "write_reference.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
