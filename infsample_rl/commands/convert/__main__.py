"""Another trainer's configuration into ours: python -m infsample_rl convert trl|verl|openrlhf FILE [ARGUMENT ...]

FILE      trl: a YAML file of its command line, a Python script with GRPOTrainer or RLOOTrainer, or a shell script;
          verl: a shell script with `verl.trainer.main_ppo key=value ...`, or a Hydra YAML file; openrlhf: a shell
          script with `openrlhf.cli.train_ppo_ray --flags`
ARGUMENT  what their command would get behind the file, in their spelling: --model_name_or_path NAME,
          data.train_batch_size=64

A script is run up to where training would start, in the sandbox that reward functions have: without network, and
without writing anything. The experiment is printed, every setting with its origin, below it what has no equivalent,
differs, changes nothing or is unknown. What was dropped is said on stderr too.
Exit codes: 0 done; 3 done, but something was dropped; 1 it failed; 2 an input is wrong, or the settings contradict each
other here (said after they are printed).
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from pathlib import Path

from infsample_rl.commands.convert import openrlhf, trl, trl_files, verl
from infsample_rl.commands.convert.conversion import SECRET, Conversion
from infsample_rl.commands.convert.written import experiment_yaml
from infsample_rl.config.command_line import run_command
from infsample_rl.config.loading import load_config

PEERS = ("trl", "verl", "openrlhf")
DROPPED = 3  # exit code


def convert_file(peer: str, path: Path, arguments: list[str]) -> Conversion:
    """Read and convert; ValueError in one line for what cannot be."""
    if not path.is_file():
        raise ValueError(f"FILE={path}: there is no such file")
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"FILE={path} is not UTF-8 text (byte {error.start})") from None
    if peer == "trl":
        given, trainer = trl_files.read(path, arguments)
        return trl.convert(given, trainer=trainer)
    module = {"verl": verl, "openrlhf": openrlhf}[peer]
    return module.convert(module.read(path, arguments))


def check_experiment(text: str) -> None:
    """Compose the printed experiment and check it as a run would, but for models and data. ValueError where it cannot
    run."""
    with tempfile.TemporaryDirectory() as folder:
        experiment = Path(folder) / "experiment" / "converted.yaml"
        experiment.parent.mkdir()
        experiment.write_text(text)
        load_config(["+experiment=converted"], folder)


def _run(arguments: list[str]) -> int:
    if len(arguments) < 2 or arguments[0] not in PEERS:
        raise ValueError(f"give one of {', '.join(PEERS)} and a file, got {' '.join(arguments[:2])!r}")
    peer, path = arguments[0], Path(arguments[1])
    conversion = convert_file(peer, path, arguments[2:])
    name = re.sub(r"\W+", "_", path.stem).strip("_") or "converted"
    text = experiment_yaml(
        conversion, command=f"python -m infsample_rl convert {shlex.join(_without_keys(arguments))}", name=name
    )
    print(text, end="")
    check_experiment(text)
    for entry in conversion.dropped:
        print(f"not converted: {' '.join(entry.split())}", file=sys.stderr)
    return DROPPED if conversion.dropped else 0


def _without_keys(arguments: list[str]) -> list[str]:
    """`--hub_token KEY`, `--hub_token=KEY` and `a.token=KEY` without the key."""
    shown: list[str] = []
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if equals and SECRET.search(name):
            shown.append(f"{name}=(not shown)")
        elif shown and shown[-1].startswith("-") and SECRET.search(shown[-1]) and not argument.startswith("-"):
            shown.append("(not shown)")
        else:
            shown.append(argument)
    return shown


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run_command(_run, arguments, usage=__doc__)


if __name__ == "__main__":
    sys.exit(main())
