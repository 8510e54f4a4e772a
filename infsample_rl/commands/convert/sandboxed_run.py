"""What runs inside the sandbox, in the place of reward functions: one program, its launchers replaced by recorders.

Reads a line of JSON, runs the program until every variable it needs has a value, writes a line of JSON. Standard
library only.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections import deque
from pathlib import Path

from infsample_rl.reward.isolation import Isolation, isolate

LAUNCHERS = "python python3 ray deepspeed accelerate torchrun trl uv srun".split()
RECORD = "INFSAMPLE_RL_RECORD"  # variable: the file that recorders write
_RECORDER = f"""#!/bin/bash
[[ ${{0##*/}} == python* && $1 == -c ]] && exec {shlex.quote(sys.executable)} "$@"
printf '%s\\0' "$#" "$PWD" "${{0##*/}}" "$@" >> "${RECORD}"
[[ "${{0##*/}} $*" =~ $INFSAMPLE_RL_TRAINING ]] && kill -KILL 0
exit 0
"""
_UNBOUND = re.compile(r"line (\d+): (\S+): unbound variable")
_TEST = re.compile(r"\[\[? |\btest ")
_MOST_RUNS = 50  # every run finds a variable that has no value


def main(isolation: Isolation) -> None:
    """Answer the request at stdin: {"program", "script", "environment"} -> {"code", "said", "record"} or {"error"}."""
    request = json.loads(sys.stdin.buffer.readline())
    folder = Path(os.environ["TMPDIR"])
    for name in LAUNCHERS:
        (folder / name).write_text(_RECORDER)
        (folder / name).chmod(0o755)
    environment = request["environment"]
    environment |= {"TMPDIR": str(folder), "PATH": f"{folder}:{environment.get('PATH', os.defpath)}"}
    environment |= {RECORD: f"{folder}/record", "LC_ALL": "C.UTF-8"}  # messages as _UNBOUND reads them
    # functions come before any PATH that the script sets
    environment |= {f"BASH_FUNC_{name}%%": f'() {{ {shlex.quote(str(folder))}/{name} "$@"; }}' for name in LAUNCHERS}
    try:
        isolate(isolation)
        code, said = _run(request["program"], request["script"], environment)
        reply = {"code": code, "said": said, "record": Path(environment[RECORD]).read_text(errors="replace")}
    except (OSError, ValueError) as error:
        reply = {"error": str(error)}
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()
    os._exit(0)


def _run(program: list[str], script: str, environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and last words. With `bash -u`, a variable without value becomes ${NAME}, so that what is made of it
    names it, or empty where its line tests it; a parameter such as $1 becomes empty."""
    lines = Path(script).read_text(errors="replace").split("\n")
    unset: dict[str, str] = {}
    for _ in range(_MOST_RUNS):
        Path(environment[RECORD]).write_bytes(b"")
        with subprocess.Popen(
            program,
            env=environment | unset,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            assert process.stderr is not None
            said = deque(process.stderr, maxlen=200)
        found = {name: int(line) for line, name in _UNBOUND.findall("".join(said)) if name not in unset}
        if not found:
            break
        unset |= {name: "" if _TEST.search(lines[line - 1]) else f"${{{name}}}" for name, line in found.items()}
        if not all(name.isidentifier() for name in found):
            program = [word for word in program if word != "-u"]
    spoken = [line.strip() for line in said if line.strip() and not line.startswith("+")]  # + is of set -x
    return process.returncode, spoken[-1] if spoken else ""
