"""Running steps of the schedules on recorded lengths, beside the lower bound of their KV memory; a Markdown table.

python scripts/schedule_steps.py [--group-size 32] [--slots 4] [--cap 2048] [--page-size 1] tests/rollout/lengths/*.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from infsample_rl.rollout.simulator import simulate

SCHEDULES = ("naive", "fixed_slot", "arrival", "infinite", "lpt", "token_budget")  # all but token_budget know the true lengths


def main() -> None:
    """Print one row per file and schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    for name, default in (("group-size", 32), ("slots", 4), ("cap", 2048), ("page-size", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print("| lengths | schedule | steps | / bound | / infinite | recomputed | preemptions |\n|---|---|---|---|---|---|---|")
    for file in options.files:
        groups = [json.loads(line)["lengths"][: options.group_size] for line in file.read_text().splitlines()]
        budget = options.slots * options.cap
        bound = sum(max(max(lengths), sum(length * (length + 1) / 2 for length in lengths) / budget) for lengths in groups)
        tokens = sum(map(sum, groups))
        settings = {"slots": options.slots, "max_new_tokens": options.cap, "page_size": options.page_size}
        results = {name: [simulate(lengths, name, **settings) for lengths in groups] for name in SCHEDULES}
        steps = {name: sum(result.running_steps for result in found) for name, found in results.items()}
        for name, found in results.items():
            lost, preempted = (sum(getattr(result, key) for result in found) for key in ("recomputed_tokens", "preemptions"))
            row = (file.stem, name, f"{steps[name] / len(groups):,.0f}", f"{steps[name] / bound:.2f}", f"{steps[name] / steps['infinite']:.3f}")
            print(f"| {' | '.join(row)} | {lost / tokens:.3f} | {preempted / len(groups):.1f} |")


if __name__ == "__main__":
    main()
