"""What a reward process may do, by reward.isolation: its environment, its memory, its files; and its start and end.

none     a process of its own, ended with all it started; its output is bounded
limits   and: memory and the size of a file bounded, an environment without keys, no reach into other processes
sandbox  and: no network, and only the files it needs; refused where the system cannot hold it to that

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import site
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

from infsample_rl.config.reward import ISOLATIONS, RewardConfig
from infsample_rl.reward.linux_sandbox import keep_out_of_other_processes, sandbox

# What programs and libraries need of an environment; nothing here holds a key.
PASSED_ON = (
    "PATH HOME USER LOGNAME SHELL TMPDIR LANG LANGUAGE LC_ALL LC_CTYPE TZ TERM VIRTUAL_ENV LD_LIBRARY_PATH "
    "PYTHONHOME PYTHONHASHSEED PYTHONUNBUFFERED XDG_CACHE_HOME HF_HOME HF_HUB_OFFLINE TOKENIZERS_PARALLELISM "
    "OMP_NUM_THREADS MKL_NUM_THREADS CUDA_VISIBLE_DEVICES INFSAMPLE_RL_CACHE "
    "SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE"
).split()
_READABLE = (
    "/usr /lib /lib32 /lib64 /bin /sbin /etc/alternatives /etc/ld.so.cache /etc/localtime /etc/passwd /etc/group "
    "/etc/nsswitch.conf /etc/os-release /dev/zero /dev/random /dev/urandom /proc/self /proc/cpuinfo /proc/meminfo "
    "/proc/stat /sys/devices/system"
).split()
START_LIMIT_S = 300.0  # a user's file may import a large library
END_LIMIT_S = 20.0  # for a keeper to end all there is
_KEEPER = (
    "import json, sys; sys.path = (own := json.loads(sys.argv[1])) + [p for p in sys.path if p and p not in own]; "
    "from infsample_rl.reward.keeper import main; main(*sys.argv[2:])"
)


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """What one reward process is held to; goes to it as JSON."""

    level: str
    memory_limit: str  # as it was set, for messages
    memory_bytes: int
    environment: list[str]  # names that were asked for: their values are left out of messages and output
    read: list[str]
    write: list[str]
    most_processes: int = 1000  # it and all below it, what earlier calls left behind among them
    ends_orphans: bool = False  # else what a call started may run on beside later ones
    held: str = "a reward function"  # for messages


def isolation_of(reward: RewardConfig, files: Sequence[str]) -> Isolation:
    """What the reward settings say, for the user's files. ValueError in one line for what is not there or cannot be
    done here."""
    if reward.isolation != "none" and not sys.platform.startswith("linux"):
        raise ValueError(
            f"reward.isolation={reward.isolation} needs Linux, this is {sys.platform}; set reward.isolation=none"
        )
    missing = [name for name in reward.environment if name not in os.environ]
    if missing and reward.isolation != "none":
        raise ValueError(f"reward.environment names {missing[0]}, which is not set")
    is_sandbox = reward.isolation == "sandbox"
    absent = [path for path in reward.read_paths if not os.path.exists(path)]
    if absent and is_sandbox:
        raise ValueError(f"reward.read_paths: there is no {absent[0]}")
    return Isolation(
        level=reward.isolation,
        memory_limit=reward.memory_limit,
        memory_bytes=reward.memory_bytes,
        environment=reward.environment,
        read=[*_READABLE, *_python_folders(), *_folders_of_files(files), *reward.read_paths] if is_sandbox else [],
        write=["/dev/null"] if is_sandbox else [],
    )


def environment_of(isolation: Isolation, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment a reward process starts with: with `none` all of it, else PASSED_ON and what was asked for. Sets
    of strings have one order in all of them, else what an environment or a function says would not repeat."""
    ordered = {"PYTHONHASHSEED": "0"}
    if isolation.level == "none":
        return ordered | dict(environment)
    kept = {name: environment[name] for name in (*PASSED_ON, *isolation.environment) if name in environment}
    return ordered | {"OMP_NUM_THREADS": "1"} | kept  # a thread's stack counts as memory


def start_keeper(
    isolation: Isolation, served: str, python: str = sys.executable, pass_fds: Sequence[int] = (), stderr: Any = None
) -> Popen[bytes]:
    """A keeper (reward/keeper.py) of the module `served`, in an interpreter that finds this package and, where it is
    this one, all that is found here."""
    path = sys.path if python == sys.executable else _package_path()
    return Popen(
        [python, "-c", _KEEPER, json.dumps(path), json.dumps(asdict(isolation)), served],
        stdin=PIPE,
        stdout=PIPE,
        stderr=stderr,
        start_new_session=True,  # Ctrl-C is left to the parent
        pass_fds=pass_fds,
        env=environment_of(isolation, os.environ),
    )


def end_keeper(keeper: Popen[bytes]) -> None:
    """End it and all that it keeps, at once."""
    keeper.terminate()
    try:
        keeper.wait(END_LIMIT_S)
    except TimeoutExpired:  # stopped, or its machine is: what it keeps ends with it
        os.killpg(keeper.pid, signal.SIGKILL)
        keeper.wait()


def isolate(isolation: Isolation) -> None:
    """Hold the calling process, which has one thread, and all it starts to its limits. ValueError when the system
    cannot."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if isolation.level == "none":
        return
    # private memory; what is shared counts in the keeper's sum
    for limit in (resource.RLIMIT_DATA, resource.RLIMIT_FSIZE):
        hard = resource.getrlimit(limit)[1]
        bytes_ = isolation.memory_bytes if hard == resource.RLIM_INFINITY else min(hard, isolation.memory_bytes)
        resource.setrlimit(limit, (bytes_, bytes_))
    with contextlib.suppress(OSError):
        # where the machine runs out of memory, this goes before a worker does
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        if isolation.level == "sandbox":
            sandbox(isolation.read, isolation.write)
        else:
            keep_out_of_other_processes()
    except (ValueError, OSError) as error:
        weaker = ISOLATIONS[ISOLATIONS.index(isolation.level) - 1]
        raise ValueError(
            f"reward.isolation={isolation.level} cannot be had: it {error}; reward.isolation={weaker} asks for less"
        ) from None


def _python_folders() -> set[str]:
    """Where this interpreter and everything on its path is; never a folder that holds the user's home."""
    package = str(Path(__file__).resolve().parents[1])
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages(), *sys.path}
    folders.add(str(Path(sys.executable).resolve().parent))
    return {package, *(folder for folder in folders if folder and not holds_home(folder))}


def folders_of(python: str) -> list[str]:
    """Where another interpreter is: its virtual environment, and what that was made of."""
    folders = {str(Path(path).parents[1]) for path in (python, os.path.realpath(python))}
    return [folder for folder in folders if not holds_home(folder)]


def _package_path() -> list[str]:
    """What another interpreter needs to find this package; one that it is installed for needs nothing."""
    root = Path(__file__).resolve().parents[2]
    return [] if root.name in ("site-packages", "dist-packages") else [str(root)]


def _folders_of_files(files: Sequence[str]) -> list[str]:
    """The folders of the users' files, which may import what stands beside them."""
    folders = [str(Path(path).resolve().parent) for path in files]
    for folder in filter(holds_home, folders):
        raise ValueError(
            f"reward.isolation=sandbox lets functions read their own folder, but {folder} holds your home; move the "
            "file into a folder"
        )
    return folders


def holds_home(folder: str) -> bool:
    """Whether the user's home, with the keys in it, is the folder or below it."""
    home = Path(os.path.expanduser("~")).resolve()
    resolved = Path(folder).resolve()
    return resolved == home or resolved in home.parents
