"""What every process did in the newest step of a trace: python scripts/draw_timeline.py RUN_FOLDER OUT.png"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from matplotlib.image import imsave

from infsample_rl.observe.timeline_picture import draw_timeline, newest_step


def main() -> int:
    """Draw it; 2 where there is no trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    found = newest_step(arguments.run / "trace.json")
    if found is None:
        print(f"draw_timeline: {arguments.run / 'trace.json'} holds no step", file=sys.stderr)
        return 2
    imsave(arguments.out, draw_timeline(*found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
