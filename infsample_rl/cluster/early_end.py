"""SIGTERM, Ctrl-C and wrong input while a run starts: there is nothing to keep yet, so they end the process where it
stands, and remove the session folder that Ray has made for it.

Threads import beside Ray's start. An exception out of a handler could surface anywhere, in the import system's own
callbacks too: it would be dropped there, or leave a lock held that those threads wait for, and this process for them.
And a handler in Python has to wait while the main thread is in Ray's own code, which on a busy machine is half a
minute. So the handlers only hold the main thread where it is, and a thread that the signal wakes ends the process. It
imports nothing and takes no lock: another thread may hold it for ever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from infsample_rl.reward.process_tree import descendants

SIGTERM_SAID = "ended by SIGTERM before the run began: nothing has been written"
_ENDS = {  # what is said, and the exit code
    signal.SIGTERM: (SIGTERM_SAID, 0),
    signal.SIGINT: ("interrupted before the run began: nothing has been written", 130),
}
# Once stdin ends. A session is named by its start and its driver's process id, which an older one may share.
_SCRIPT = """
exec 2> /dev/null
read -r _
kill -KILL "$@"
for session in "$FOLDER"/session_*_"$OWN"; do
    if [ "${session##*/}" \\> "$SINCE" ]; then rm -rf "$session"; fi
done
if [ ! -e "$FOLDER/session_latest" ]; then rm -f "$FOLDER/session_latest"; fi
"""
_since = ""  # how a session's name begins that is made from now on


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C end this process and all it started, until take_over() or the end of the block. In the
    main thread."""
    global _since
    _since = time.strftime("session_%Y-%m-%d_%H-%M-%S")
    before = {number: signal.getsignal(number) for number in _ENDS}
    if before[signal.SIGINT] is signal.SIG_IGN:
        del before[signal.SIGINT]  # a shell's background job: Ctrl-C is for another
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    threading.Thread(target=_watch, args=(woken,), name="early end", daemon=True).start()
    signal.set_wakeup_fd(wake)
    for number in before:
        signal.signal(number, _wait_for_the_end)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is _wait_for_the_end:
                signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(wake)  # which ends the thread


def take_over(on_sigterm: Callable[[int, FrameType | None], object]) -> None:
    """Give SIGTERM to this handler, and Ctrl-C back to Python, which raises KeyboardInterrupt. No signal is lost
    between."""
    is_early = signal.getsignal(signal.SIGTERM) is _wait_for_the_end
    signal.signal(signal.SIGTERM, on_sigterm)
    if signal.getsignal(signal.SIGINT) is _wait_for_the_end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_early:
        signal.set_wakeup_fd(-1)  # last: whatever comes before ends the process


def _wait_for_the_end(_number: int, _frame: FrameType | None) -> NoReturn:
    while True:
        time.sleep(60.0)


def _watch(woken: int) -> None:
    """Read the numbers of signals until one of them ends this process, or nobody writes them any more."""
    while numbers := os.read(woken, 1):
        if numbers[0] in _ENDS:
            end_process(*_ENDS[signal.Signals(numbers[0])])
    os.close(woken)


def is_command() -> bool:
    """Whether a command of this package is all that this process is for: no script, test or notebook has called it."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None) or ""
    return (os.path.basename(file) if spec is None else spec.name).partition(".")[0] == "infsample_rl"


def end_process(said: str, code: int) -> NoReturn:
    """Say a line on stderr, and end this process with all it has started. From any thread."""
    sys.setswitchinterval(1e-6)  # /proc is hundreds of small reads: behind each a thread that imports would have 5 ms
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(2, f"{said}\n".encode())
    if sys.platform.startswith("linux"):  # elsewhere Ray's own reaper ends its processes once this one is gone
        with contextlib.suppress(OSError):
            _end_after_this_process(_stopped())
    os._exit(code)  # threads that import cannot be told to end


def _stopped() -> list[int]:
    """Ids of all processes below this one, which have been stopped: they start no others."""
    stopped = dict[int, None]()
    while new := [pid for pid in descendants(os.getpid()) if pid not in stopped]:
        for pid in new:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= dict.fromkeys(new)
    return list(stopped)


def _end_after_this_process(pids: list[int]) -> None:
    """SIGKILL to them once this process is gone: Ray's code in it aborts, with an exit code of its own, when it sees
    Ray's processes end. No fork(), whose hooks take locks."""
    gone, _ = os.pipe()  # the other end closes with this process
    arguments = ["sh", "-c", _SCRIPT, "sh", *map(str, pids)]
    environment = {
        "FOLDER": os.path.join(os.environ.get("RAY_TMPDIR", "/tmp"), "ray"),
        "OWN": str(os.getpid()),
        "SINCE": _since,
    }
    os.posix_spawn("/bin/sh", arguments, environment, file_actions=[(os.POSIX_SPAWN_DUP2, gone, 0)], setsid=True)
