"""python -m infsample_rl.plan: the command of infsample_rl/commands/plan.py."""

import sys

from infsample_rl.commands.plan import main

if __name__ == "__main__":
    sys.exit(main())
