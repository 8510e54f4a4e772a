"""python -m infsample_rl.simulate: the command of infsample_rl/commands/simulate.py."""

import sys

from infsample_rl.commands.simulate import main

if __name__ == "__main__":
    sys.exit(main())
