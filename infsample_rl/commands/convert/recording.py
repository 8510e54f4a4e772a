"""What a launch script would start, and what a TRL script gives its trainer: they are run, in the sandbox of rewards.

bash runs a launch script with the launchers on its PATH replaced by a recorder of arguments; Python runs a TRL script
against modules that record (trl_stand_ins.py). No network, no file of yours but those beside FILE, nothing written.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infsample_rl.commands.convert.conversion import SECRET, Given
from infsample_rl.config import RewardConfig, RewardFunctionConfig
from infsample_rl.reward.isolation import environment_of, holds_home, isolation_of

TIME_LIMIT_S = 60.0
_SANDBOXED = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from infsample_rl.reward.keeper import main; "
    "main(sys.argv[2], 'infsample_rl.commands.convert.sandboxed_run')"
)


@dataclass(frozen=True, slots=True)
class Command:
    """A command a script would have started. Example: Command(folder="/home/me", words=["python3", "train.py"])"""

    folder: str
    words: list[str]


def commands_of(path: Path, arguments: list[str], training: str, what: str, last: str = "") -> list[Command]:
    """The launchers' commands of a shell script, up to the first in which the pattern `last`, else `training`, is
    found. ValueError in one line that names `what` where none is training, and says how the script ended."""
    how, record = _run(["bash", "-u", str(path), *arguments], path, {"INFSAMPLE_RL_TRAINING": last or training})
    fields = iter(record.split("\0")[:-1])
    commands = [Command(next(fields), [next(fields) for _ in range(int(count) + 1)]) for count in fields]
    if not any(re.search(training, " ".join(command.words)) for command in commands):
        raise ValueError(f"{path} {how} before it started {what}" if how else f"{path} holds no command with {what}")
    return commands


def trainer_of(path: Path, arguments: list[str], known: dict[str, Any]) -> dict[str, Any]:
    """What a TRL script has given its trainer when it calls train(), as trl_stand_ins.py writes it. ValueError in one
    line where it gets no trainer. `known`: the flags, and TRL's defaults."""
    package = str(Path(__file__).resolve().parents[3])
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))}
    program = [sys.executable, "-m", "infsample_rl.commands.convert.trl_stand_ins", json.dumps(known)]
    how, record = _run([*program, str(path), *arguments], path, variables)
    if not record:
        raise ValueError(f"{path} {how or 'ended'} before GRPOTrainer or RLOOTrainer had anything to train")
    return json.loads(record)


def given_of(
    path: Path, flags: dict[str, Any], arguments: dict[str, Any], today: Callable[[str], str]
) -> dict[str, Given]:
    """Settings by their names of `today` from a script's flags and, before these, the arguments behind it."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    code = [(number, line) for number, line in enumerate(lines, start=1) if not line.lstrip().startswith("#")]

    def place(name: str) -> str:
        word = re.compile(rf"(?<!\w){re.escape(name)}(?![\w.-])")
        return next((f"line {number}" for number, line in code if word.search(line)), path.name)

    given = {today(name): Given(value, place(name), name) for name, value in flags.items()}
    return given | {today(name): Given(value, "argument", name) for name, value in arguments.items()}


def _run(program: list[str], path: Path, variables: dict[str, str]) -> tuple[str, str]:
    """Run a program in the sandbox: how it failed, "" where it did not, and what was recorded up to then."""
    beside = [folder for folder in (str(path.resolve().parent), os.getcwd()) if not holds_home(folder)]
    try:
        any_function = [RewardFunctionConfig(name="math")]
        settings = RewardConfig(functions=any_function, isolation="sandbox", read_paths=[str(path.resolve()), *beside])
        isolation = isolation_of(settings, [])
    except ValueError as error:
        raise _without_sandbox(path, str(error)) from None
    command = [sys.executable, "-c", _SANDBOXED, json.dumps(sys.path), json.dumps(dataclasses.asdict(isolation))]
    kept = {name: value for name, value in os.environ.items() if not SECRET.search(name)}
    request = {"program": program, "script": str(path), "environment": kept | variables}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment_of(isolation, os.environ),
    ) as keeper:
        assert keeper.stdin is not None and keeper.stdout is not None
        late = threading.Timer(TIME_LIMIT_S, keeper.terminate)
        late.start()
        keeper.stdin.write(json.dumps(request).encode() + b"\n")
        keeper.stdin.flush()
        replies = [json.loads(line) for line in keeper.stdout if line.strip()]
        too_late = not late.is_alive()
        late.cancel()
    reply = replies[0] if replies else {"died": "without a word"}
    if "error" in reply:
        raise _without_sandbox(path, reply["error"])
    if "died" in reply:
        return f"did not end within {TIME_LIMIT_S:.0f} s" if too_late else f"was ended ({reply['died']})", ""
    outside = " (it may read what is beside it, and write nothing)" if "ermission denied" in reply["said"] else ""
    said = f" ({reply['said']})" if reply["said"] else ""
    return f"ended with exit code {reply['code']}{said}{outside}" if reply["code"] else "", reply["record"]


def _without_sandbox(path: Path, error: str) -> ValueError:
    reason = error.partition("; ")[0]
    return ValueError(f"{path} is run to be read, in the sandbox that reward functions have: {reason}")
