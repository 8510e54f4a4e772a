"""The processes in which environments run, for who samples: the one place that knows of both."""

from __future__ import annotations

import os
import sys

from infsample_rl.cluster.rollout_interpreter import DRIVERS_PYTHON
from infsample_rl.config import Config
from infsample_rl.rollout.environment.episodes import Environments


def environments_of(config: Config) -> Environments | None:
    """Processes for the environments of one rollout worker's samples; none where a sample has one turn."""
    if not config.environment.is_set:
        return None
    from infsample_rl.reward.environment_host import EnvironmentHost

    return EnvironmentHost(config, os.environ.get(DRIVERS_PYTHON, sys.executable))
