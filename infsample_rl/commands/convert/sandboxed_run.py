"""What runs inside the sandbox, in the place of reward functions: one program, its launchers replaced by recorders.

Reads a line of JSON, runs the program, writes a line of JSON. Standard library only.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from subprocess import DEVNULL, run

from infsample_rl.reward.isolation import Isolation, isolate

LAUNCHERS = "python python3 ray deepspeed accelerate torchrun trl uv srun".split()
RECORD = "INFSAMPLE_RL_RECORD"  # variable: the file that recorders write
# What a recorder starts has a full path: by its name it would be a recorder again.
_RECORDER = f"""#!/bin/bash
[[ ${{0##*/}} == python* && $1 == -c ]] && exec {shlex.quote(sys.executable)} "$@"
printf '%s\\0' "$#" "$PWD" "${{0##*/}}" "$@" >> "${RECORD}"
[[ "${{0##*/}} $*" =~ $INFSAMPLE_RL_TRAINING ]] && kill -KILL 0
exit 0
"""


def main(isolation: Isolation) -> None:
    """Answer the request at stdin: {"program", "environment"} -> {"code", "said", "record"} or {"error"}."""
    request = json.loads(sys.stdin.buffer.readline())
    folder = Path(os.environ["TMPDIR"])
    for name in LAUNCHERS:
        (folder / name).write_text(_RECORDER)
        (folder / name).chmod(0o755)
    environment = request["environment"] | {"TMPDIR": str(folder), RECORD: f"{folder}/record"}
    environment["PATH"] = f"{folder}:{environment.get('PATH', os.defpath)}"
    # functions come before any PATH that the script sets
    environment |= {f"BASH_FUNC_{name}%%": f'() {{ {shlex.quote(str(folder))}/{name} "$@"; }}' for name in LAUNCHERS}
    (folder / "record").touch()
    try:
        isolate(isolation)
        ended = run(request["program"], env=environment, stdin=DEVNULL, capture_output=True, start_new_session=True)
    except (OSError, ValueError) as error:
        reply: dict[str, object] = {"error": str(error)}
    else:  # set -x puts a + before what it says
        said = [line.strip() for line in ended.stderr.decode(errors="replace").splitlines() if line[:1] != "+"]
        reply = {"code": ended.returncode, "said": "".join(said[-1:]), "record": (folder / "record").read_text()}
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()
    os._exit(0)
