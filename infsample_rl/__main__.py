"""python -m infsample_rl COMMAND ...: train, and what there is beside training."""

from __future__ import annotations

import sys
from importlib import import_module

from infsample_rl import __version__

COMMANDS = {  # name: (module with main(arguments), what it does)
    "train": ("infsample_rl.main", "train a policy; python -m infsample_rl.main is the same"),
    "plan": (
        "infsample_rl.commands.plan",
        "what a run will take, before it starts: memory, and the time of a decode step",
    ),
    "evaluate": ("infsample_rl.commands.evaluate", "mean reward and pass@k of a checkpoint on held-out problems"),
    "chat": ("infsample_rl.commands.chat", "talk with a checkpoint"),
    "serve": ("infsample_rl.commands.serve.__main__", "a checkpoint behind HTTP, for harnesses that call the policy"),
    "merge": ("infsample_rl.commands.merge", "a LoRA checkpoint merged into its base model"),
    "report": ("infsample_rl.commands.report", "one HTML page of one run or of several"),
    "replay": ("infsample_rl.commands.replay", "the update of a recorded step once more, by the learner alone"),
    "train_predictor": (
        "infsample_rl.commands.train_predictor",
        "the bert length predictor, fitted to completions",
    ),
    "simulate": ("infsample_rl.commands.simulate", "schedules over recorded lengths, without a model"),
    "convert": ("infsample_rl.commands.convert.__main__", "settings of verl, TRL or OpenRLHF as an experiment"),
    "chaos": ("infsample_rl.commands.chaos", "kill a run at random, beside one that is left alone"),
}
USAGE = "python -m infsample_rl COMMAND [arguments]; COMMAND --help says what it takes\n\n" + "\n".join(
    f"  {name:<17}{text}" for name, (_, text) in COMMANDS.items()
)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns its exit code, 2 for one that does not exist."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in ("--help", "-h"):
        print(USAGE)
        return 0
    if given[0] == "--version":
        print(f"infsample_rl {__version__}")
        return 0
    if given[0] not in COMMANDS:
        print(f"error: {given[0]} is no command; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return import_module(COMMANDS[given[0]][0]).main(given[1:])


if __name__ == "__main__":
    sys.exit(main())
