"""What a run will take, before it starts: python -m infsample_rl.plan [+experiment=NAME] [group=CHOICE] [group.key=value ...]

  cluster.device_type=h100   GPU to reckon with, where there is none here
  --lengths FILE             recorded response lengths (as simulate takes), for the running steps
  --json                     one JSON object on stdout
  --config-dir DIR           as main's

Needs the model's config alone: a folder with config.json, or a hub name. No weight is read, no GPU is used.
Exit codes: 0 it fits; 1 it does not; 2 a setting or an input is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

from infsample_rl.config_loading import ConfigError, load_config


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Flags apart from main's name=value overrides. ConfigError for a wrong flag."""
    parser = argparse.ArgumentParser(prog="python -m infsample_rl.plan", usage=__doc__, add_help=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--lengths", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--config-dir")
    parser.add_argument("overrides", nargs="*")
    parser.error = _refuse  # type: ignore[method-assign]
    return parser.parse_intermixed_args(arguments)


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message}; flags are --lengths FILE, --json, --config-dir DIR and --help")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    try:
        options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        if options.help:
            print(__doc__)
            return 0
        if options.config_dir is not None and not os.path.isdir(options.config_dir):
            raise ConfigError(f"--config-dir {options.config_dir} is not a folder")
        config = load_config(options.overrides, options.config_dir)
        from infsample_rl.plan.run_plan import plan_run

        plan = plan_run(config, options.lengths)
    except ValueError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(plan.record()))
    else:
        from rich.console import Console

        from infsample_rl.plan.report import print_plan

        print_plan(plan, Console(highlight=False))
    return 0 if plan.fits else 1


if __name__ == "__main__":
    sys.exit(main())
