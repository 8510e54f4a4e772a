"""python -m infsample_rl.evaluate: the command of infsample_rl/commands/evaluate.py."""

import sys

from infsample_rl.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
