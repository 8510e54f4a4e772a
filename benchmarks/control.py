"""A control run, from which nothing can be learnt: python -m benchmarks.control [+experiment=NAME] [key=value ...]

The same as python -m infsample_rl.main, but the advantages are shuffled within every group before the policy is
trained: what it gains then, it does not gain from its rewards.
"""

from __future__ import annotations

import random
import sys

from infsample_rl import main as training
from infsample_rl.controller.groups import Group, StepGroups


def shuffle_advantages(group: Group, seed: str) -> None:
    """Permute the advantages of a group's trained samples; `seed` says how."""
    trained = group.trained_samples()
    shuffled = [sample.advantage for sample in trained]
    random.Random(seed).shuffle(shuffled)
    for sample, advantage in zip(trained, shuffled, strict=True):
        sample.advantage = advantage


def main(arguments: list[str] | None = None) -> int:
    """Train with shuffled advantages; returns the exit code of training."""
    set_advantages = StepGroups._set_advantages

    def set_shuffled(self: StepGroups, group: Group) -> None:
        set_advantages(self, group)
        shuffle_advantages(group, f"{self._config.run.seed}/{self.step}/{group.prompt.prompt_index}")

    StepGroups._set_advantages = set_shuffled  # type: ignore[method-assign]
    return training.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
