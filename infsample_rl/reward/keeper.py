"""Keeps one reward process: a small parent that never runs a function, counts memory, bounds output, and ends all that
was started.

    reward worker --pipe--> stand-in --fork--> keeper --fork--> function process --> whatever a function starts

Every orphan below the keeper becomes its child (PR_SET_CHILD_SUBREAPER), so nothing that a function started, whatever
session it is in and whatever signals it ignores, outlives the keeper's last act: killing its children until there are
none. It acts when the function process ends, when SIGTERM tells it to, and when the worker's end of the pipe is gone.

Ray kills the children of a worker that ends, before they could act. That is why the worker's child is a stand-in that
waits for the keeper: when either is killed, the other ends all.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from infsample_rl.reward.hidden_values import begun_value, hide_values_of, without_values
from infsample_rl.reward.isolation import Isolation
from infsample_rl.reward.linux_sandbox import DEATH_SIGNAL, SUBREAPER, prctl
from infsample_rl.reward.process_tree import descendants, end_everything, end_orphans

LOOK_EVERY_MS = 200  # at memory
ENVIRONMENT = b"environment"  # the name of a trajectory's process
# of a function process's stdout and stderr that are passed on in a minute
OUTPUT_BYTES, OUTPUT_WINDOW_S = 1 << 16, 60.0
_LINUX = sys.platform.startswith("linux")
_PAGE = os.sysconf("SC_PAGESIZE")


def main(settings: str, served: str) -> None:
    """Fork the keeper and stand in for it; `settings` is an Isolation as JSON, `served` the module whose main() is the
    function process. Reads nothing: stdin and stdout are the function process's pipes."""
    prctl(SUBREAPER, 1)  # the parent of whatever is orphaned below
    stand_in, keeper = os.getpid(), os.fork()
    if keeper == 0:
        _be_keeper(Isolation(**json.loads(settings)), served, stand_in)
        return
    signal.signal(signal.SIGTERM, lambda *_: os.kill(keeper, signal.SIGTERM))
    os.waitpid(keeper, 0)
    end_everything(keeper)


def _be_keeper(isolation: Isolation, served: str, stand_in: int) -> None:
    """Fork the function process, keep it, and say how it died."""
    hide_values_of(isolation.environment)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)  # the wake-up is what counts
    prctl(SUBREAPER, 1)
    _end_with(stand_in, signal.SIGTERM)
    folder = tempfile.mkdtemp(prefix="infsample_rl_reward_") if isolation.level == "sandbox" else None
    output, written = os.pipe()
    keeper, child = os.getpid(), os.fork()
    if child == 0:
        for descriptor in (woken, wake, output):
            os.close(descriptor)
        _become_function_process(isolation, keeper, folder, written, served)
    os.close(written)
    died = _Keeper(isolation, child, woken, output).keep()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    _tell(died if os.getppid() == stand_in else "its keeper was killed")


def _become_function_process(isolation: Isolation, keeper: int, folder: str | None, written: int, served: str) -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    _end_with(keeper, signal.SIGKILL)
    os.dup2(written, 2)
    os.close(written)
    if folder is not None:
        os.environ |= {"TMPDIR": folder, "HOME": folder}
        tempfile.tempdir = None
        isolation.write.append(folder)
    importlib.import_module(served).main(isolation)  # only here: the keeper stays small


def _end_with(parent: int, number: signal.Signals) -> None:
    """Get this signal when the parent ends."""
    prctl(DEATH_SIGNAL, number)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


class _Keeper:
    def __init__(self, isolation: Isolation, child: int, woken: int, output: int):
        self._isolation, self._child, self._woken, self._output = isolation, child, woken, output
        self._window_ends, self._passed_on, self._left_out = 0.0, 0, 0
        self._held = b""  # of the output: what may be the beginning of a value that is not shown

    def keep(self) -> str:
        """Wait until the function process has to end, end it and all it started; how it died."""
        try:
            died = self._wait()
        finally:
            end_everything(self._child)
        while select.select([self._output], [], [], 0)[0] and self._pass_on():
            pass
        self._show(b"", is_last=True)
        self._say_what_was_left_out()
        return died

    def _wait(self) -> str:
        poll = select.poll()
        poll.register(0, 0)  # only whether the worker's end is gone
        poll.register(self._woken, select.POLLIN)
        poll.register(self._output, select.POLLIN)
        died = ""
        while not died:
            events = dict(poll.poll(LOOK_EVERY_MS))
            if self._output in events and not self._pass_on():
                poll.unregister(self._output)
            # one byte for each signal: its number
            told = self._woken in events and signal.SIGTERM in os.read(self._woken, 1 << 12)
            died = self._reap()
            if not died and (told or 0 in events):
                died = "ended by the worker"
            if self._isolation.ends_orphans and _LINUX:
                end_orphans(self._child)
            if not died and self._isolation.level != "none":
                died = self._above_limits()
        return died

    def _reap(self) -> str:
        """Bury what has ended, orphans too; how the function process died, "" while it lives."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)  # there always is a child: the function process
            if pid == self._child:
                return how_ended(os.waitstatus_to_exitcode(status))
            if pid == 0:
                return ""

    def _pass_on(self) -> bool:
        """Read some of the output and show it; whether there can be more."""
        read = os.read(self._output, 1 << 16)
        self._show(read, is_last=not read)
        return bool(read)

    def _show(self, read: bytes, *, is_last: bool) -> None:
        """Write output to stderr, as far as this minute's share goes."""
        read = self._held + read
        begun = 0 if is_last else begun_value(read)
        read, self._held = read[: len(read) - begun], read[len(read) - begun :]
        read = without_values(read.decode(errors="replace")).encode()
        if time.monotonic() > self._window_ends:
            self._say_what_was_left_out()
            self._window_ends, self._passed_on = time.monotonic() + OUTPUT_WINDOW_S, 0
        room = OUTPUT_BYTES - self._passed_on
        shown, self._left_out = read[:room], self._left_out + max(0, len(read) - room)
        self._passed_on += len(shown)
        if shown:
            _write(shown.decode(errors="replace"))

    def _say_what_was_left_out(self) -> None:
        if self._left_out:
            _write(
                f"\n[{self._left_out:,} bytes that {self._isolation.held} printed are left out: {OUTPUT_BYTES:,} are "
                "shown in a minute]\n"
            )
        self._left_out = 0

    def _above_limits(self) -> str:
        """What to say when the function process and all it started, orphans too, are or hold more than they may, else
        ""."""
        tree, held_to, limit = descendants(os.getpid()), self._isolation, self._isolation.memory_bytes
        if len(tree) > held_to.most_processes:
            most = f"at most {held_to.most_processes:,} may run at a time"
            return f"{len(tree):,} processes, what earlier calls left among them; {most}"
        if sum(_held_bytes(pid) for pid in tree) <= limit:
            return ""
        held = {pid: _held_bytes(pid, shared_once=True) for pid in tree}
        used, above = sum(held.values()), f"above reward.memory_limit={held_to.memory_limit}"
        if used <= limit or (held_to.ends_orphans and held[self._child] <= limit and _end_largest(held)):
            return ""
        return f"{used / 1e9:.2f} GB in {len(tree)} processes, {above}"


def _end_largest(held: dict[int, int]) -> bool:
    """End the environment that holds most of the memory, so that a leak costs no other; whether there is any. What it
    started is an orphan then. `held`: bytes of processes."""
    forks = {pid: sum(held.get(each, 0) for each in [pid, *descendants(pid)]) for pid in held if _is_environment(pid)}
    if forks:
        largest = max(forks, key=forks.__getitem__)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(largest, signal.SIGKILL)
    return bool(forks)


def _is_environment(pid: int) -> bool:
    """Whether it is a trajectory's, with a session of its own; the server has forked services, too."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_bytes() == ENVIRONMENT + b"\n" and os.getpgid(pid) == pid
    return False


def _held_bytes(pid: int, shared_once: bool = False) -> int:
    """Resident memory of a process; `shared_once`: its share alone of what several have, which is slower to read."""
    try:
        if shared_once:
            return int(Path(f"/proc/{pid}/smaps_rollup").read_text().split("\nPss:")[1].split()[0]) * 1024
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def how_ended(code: int) -> str:
    """Of an exit code as os.waitstatus_to_exitcode() gives it: "exit code 3", "killed by SIGKILL"."""
    names = {number.value: number.name for number in signal.Signals}
    return f"exit code {code}" if code >= 0 else f"killed by {names.get(-code, f'signal {-code}')}"


def _tell(died: str) -> None:
    """The last line of the replies' pipe: how the function process died. Nobody else holds the pipe any more."""
    os.set_blocking(1, False)
    with contextlib.suppress(OSError):  # full of what a function wrote into it, or the worker is gone
        os.write(1, b"\n" + json.dumps({"died": died}).encode() + b"\n")


def _write(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(2, text.encode())
