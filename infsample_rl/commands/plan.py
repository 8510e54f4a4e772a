"""What a run will take, before it starts: python -m infsample_rl.plan [+experiment=NAME] [group=CHOICE]
[group.key=value ...]

  cluster.device_type=h100   GPU to reckon with, where there is none here
  lengths=FILE               recorded response lengths (as simulate takes), for the running steps
  json=true                  one JSON object on stdout
  --config-dir DIR           as main's

Needs the model's config alone: a folder with config.json, or a hub name. No weight is read, no GPU is used.
Exit codes: 0 it fits; 1 it does not; 2 a setting or an input is wrong.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from infsample_rl import lasting_imports
from infsample_rl.config.command_line import option, parse_with_settings, run_command
from infsample_rl.config.loading import load_config
from infsample_rl.config.overrides import ConfigError, parse_flags


@dataclass(kw_only=True)
class PlanOptions:
    """What is no setting of a run."""

    lengths: str | None = option(None, "recorded response lengths")
    json: bool = option(False, "print one JSON object")


def _run(arguments: list[str]) -> int:
    try:
        flags = parse_flags(arguments)
        options, overrides = parse_with_settings(flags.words, PlanOptions)
        config = load_config(overrides, flags.config_dir)
    except ConfigError as error:
        from infsample_rl.commands.convert.peer_names import in_our_words

        raise ConfigError(in_our_words(str(error))) from None
    with lasting_imports():
        from infsample_rl.plan.run_plan import plan_run

    if options.lengths == "":
        raise ValueError("lengths is empty: give lengths=FILE.jsonl or a run folder")
    plan = plan_run(config, None if options.lengths is None else Path(options.lengths))
    if options.json:
        print(json.dumps(plan.record()))
    else:
        from rich.console import Console

        from infsample_rl.plan.report import print_plan

        print_plan(plan, Console(highlight=False))
    return 0 if plan.fits else 1


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run_command(_run, arguments, usage=__doc__)
