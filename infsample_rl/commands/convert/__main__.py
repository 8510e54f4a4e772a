"""Another trainer's configuration into ours: python -m infsample_rl convert trl|verl|openrlhf FILE [ARGUMENT ...]

FILE      trl: a YAML file of its command line, a Python script with GRPOTrainer, or a shell script; verl: a shell
          script with `verl.trainer.main_ppo key=value ...`, or a Hydra YAML file; openrlhf: a shell script with
          `openrlhf.cli.train_ppo_ray --flags`
ARGUMENT  what their command would get behind the file, in their spelling: --model_name_or_path NAME

A script is run up to where training would start, in the sandbox that reward functions have: no network, no writing. The
experiment is printed with the origin of every setting, and what was not converted, which is said on stderr too.
Exit codes: 0 done; 3 done, but something was not converted; 1 it failed; 2 an input is wrong, or the settings
contradict each other here (said after they are printed).
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from infsample_rl.commands.convert import openrlhf, trl, verl
from infsample_rl.config.command_line import run_command
from infsample_rl.config.loading import load_config
from infsample_rl.config.overrides import ConfigError

PEERS = {"trl": trl.convert, "verl": verl.convert, "openrlhf": openrlhf.convert}


def _run(arguments: list[str]) -> int:
    if len(arguments) < 2 or arguments[0] not in PEERS:
        raise ValueError(f"give one of {', '.join(PEERS)} and a file, got {' '.join(arguments[:2])!r}")
    peer, path = arguments[0], Path(arguments[1])
    if not path.is_file():
        raise ValueError(f"FILE={path}: there is no such file")
    conversion = PEERS[peer](path, arguments[2:])
    name = re.sub(r"\W+", "_", path.stem).strip("_") or "converted"
    text = conversion.yaml(f"python -m infsample_rl convert {peer} {path.name}", name)
    print(text, end="")
    for entry in sorted(conversion.dropped):
        print(f"not converted: {entry}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:  # composed and checked as a run would, but for models and data
        written = Path(folder) / "experiment" / "converted.yaml"
        written.parent.mkdir()
        written.write_text(text)
        try:
            load_config(["+experiment=converted"], folder)
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(written), "the experiment above")) from None
    return 3 if conversion.dropped else 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run_command(_run, arguments, usage=__doc__)


if __name__ == "__main__":
    sys.exit(main())
