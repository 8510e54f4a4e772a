"""python -m infsample_rl.chaos: the command of infsample_rl/commands/chaos.py."""

import sys

from infsample_rl.commands.chaos import main

if __name__ == "__main__":
    sys.exit(main())
