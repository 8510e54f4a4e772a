"""Run the commands of a page of results again: python scripts/rerun_results.py PAGE [NAME=VALUE ...]

PAGE is a name in docs/results/, as engine. NAMEs are the words in capitals that the commands leave open, as FOLDER or
PYTHON: without them the commands are shown, with what they need. They run one after another, as the page has them; the
first that fails ends it. Figures are compared, and written into the page, by whoever ran it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
WRITTEN_BY = {"gpu": "make gpu-evidence", "paper_tables": "make tables"}
OPEN = re.compile(r"(?<=[=\[, ])[A-Z]{3,}(?=[\s\],/]|$)")


def main() -> int:
    """As the module says; 2 for a page or names that are wrong, else the status of the last command."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if len(sys.argv) > 1 else 2
    page, given = sys.argv[1], dict(word.split("=", 1) if "=" in word else (word, "") for word in sys.argv[2:])
    commands = commands_of(RESULTS / f"{page}.md")
    if page in WRITTEN_BY:
        return refuse(f"{page} is written by `{WRITTEN_BY[page]}`")
    if not commands:
        known = ", ".join(sorted(path.stem for path in RESULTS.glob("*.md") if commands_of(path)))
        return refuse(f"{page} has no commands; pages that have: {known}")
    needed = sorted({name for command in commands for name in OPEN.findall(command)})
    unknown = sorted(given.keys() - set(needed))
    if unknown:
        return refuse(f"{unknown[0]} is not in the commands of {page}, which need {', '.join(needed) or 'nothing'}")
    missing = [f"{name}=..." for name in needed if not given.get(name)]
    if missing:
        print("\n".join(commands))
        return refuse(f"{page} needs {' '.join(missing)}")
    environment = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    for command in commands:
        command = OPEN.sub(lambda found: given[found[0]], command)
        print(f"$ {command}", flush=True)
        status = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment).returncode
        if status:
            return status
    return 0


def commands_of(path: Path) -> list[str]:
    """The commands in the fenced blocks of a page, without what is said of them behind a #."""
    if not path.is_file():
        return []
    blocks = re.findall(r"^```\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    lines = [re.split(r"\s{2,}#", line)[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if re.match(r"(python|make) ", line)]


def refuse(reason: str) -> int:
    """Say in one line why nothing runs."""
    print(f"error: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
