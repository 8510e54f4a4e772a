"""What Linux lets an unprivileged process give up for good: Landlock, seccomp and capabilities, by their system calls.
Standard library only.

Numbers and structures are those of linux/landlock.h, linux/seccomp.h and linux/capability.h. Everything holds for the
calling process and all it starts, and cannot be undone. Only for a process with one thread.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import stat
import struct
import sys

SUBREAPER, DEATH_SIGNAL, NAME = 36, 1, 15  # prctl
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_FS = {
    name: 1 << bit
    for bit, name in enumerate(
        "execute write_file read_file read_dir remove_dir remove_file make_char make_dir make_reg make_sock make_fifo "
        "make_block make_sym refer truncate ioctl_dev".split()
    )
}
_READ = _FS["execute"] | _FS["read_file"] | _FS["read_dir"]
_OF_FILES = _FS["execute"] | _FS["write_file"] | _FS["read_file"] | _FS["truncate"] | _FS["ioctl_dev"]
_SCOPES = 3  # signals, and abstract sockets
SANDBOX_VERSION = 3  # Linux 6.2: the first that can forbid truncate()

_RIGHTS_OVER_FILES = 0x1F  # CAP_CHOWN to CAP_FSETID

# machine -> (AUDIT_ARCH, {system call: number})
_MACHINES = {
    "x86_64": (0xC000003E, {"socket": 41, "io_uring_setup": 425, "add_key": 248, "request_key": 249, "keyctl": 250}),
    "aarch64": (0xC00000B7, {"socket": 198, "io_uring_setup": 425, "add_key": 217, "request_key": 218, "keyctl": 219}),
}
_X32 = 0x40000000  # x86_64 takes every call a second time from here on
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


def prctl(option: int, value: int | bytes) -> None:
    """prctl(2), on Linux alone; OSError when it fails."""
    if sys.platform.startswith("linux"):
        _check(_libc().prctl(option, value, 0, 0, 0), "prctl")


def landlock_version() -> int:
    """Version of Landlock in this kernel; 0: none."""
    return max(0, _libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def keep_out_of_other_processes() -> None:
    """No signals to, and no environment, memory or tracing of, processes that this one did not start, as far as the
    system has Landlock.

    Root keeps its rights over files alone: CAP_PERFMON would read other environments in spite of Landlock.
    """
    _keep_capabilities(_RIGHTS_OVER_FILES)
    version = landlock_version()
    if version < 2:  # version 1 would also forbid renames from folder to folder
        return
    _restrict(version, handled=_FS["refer"], rules=[("/", _FS["refer"])])  # files stay as they are


def sandbox(read: list[str], write: list[str]) -> None:
    """As keep_out_of_other_processes; only the files below `read` and `write`; no sockets; no capabilities. ValueError
    where the system cannot."""
    version, machine = landlock_version(), platform.machine()
    if version < SANDBOX_VERSION:
        raise ValueError(
            f"needs Landlock version {SANDBOX_VERSION} (Linux 6.2 or newer, with landlock among its LSMs), this system "
            f"has {f'version {version}' if version else 'none'}"
        )
    if machine not in _MACHINES:
        raise ValueError(f"knows the system calls of {' and '.join(_MACHINES)}, not of {machine}")
    everything = (1 << (16 if version >= 5 else 15)) - 1
    writable = everything & ~_FS["make_char"] & ~_FS["make_block"]
    rules = [(path, _READ) for path in read] + [(path, writable) for path in write]
    _keep_capabilities(0)
    _restrict(version, handled=everything, rules=rules)
    _forbid_calls(machine)


def _restrict(version: int, *, handled: int, rules: list[tuple[str, int]]) -> None:
    """Enter a Landlock domain in which, of the rights `handled`, only those of `rules` are left; paths that do not
    exist are passed over."""
    libc = _libc()
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    attributes = struct.pack("=QQQ", handled, 0, _SCOPES if version >= 6 else 0)[:size]
    ruleset = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0))
    _check(ruleset, "landlock_create_ruleset")
    for path, rights in rules:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        rule = struct.pack("=Qi", rights & handled, descriptor)
        _check(libc.syscall(_ADD_RULE, ruleset, 1, rule, ctypes.c_uint32(0)), f"landlock_add_rule for {path}")
        os.close(descriptor)
    prctl(_NO_NEW_PRIVILEGES, 1)
    _check(libc.syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint32(0)), "landlock_restrict_self")
    os.close(ruleset)


def _keep_capabilities(kept: int) -> None:
    """Give up all capabilities but those of the mask `kept` that are there."""
    libc, header, held = _libc(), struct.pack("=Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    _check(libc.capget(header, held), "capget")
    # effective, permitted, inheritable; the second half is above bit 31
    left = [word & kept for word in struct.unpack("=6I", held.raw)[:3]]
    _check(libc.capset(header, struct.pack("=6I", *left, 0, 0, 0)), "capset")


def _forbid_calls(machine: str) -> None:
    """Answer EPERM to the calls of _MACHINES, and to all calls of another architecture, which have other numbers."""
    architecture, calls = _MACHINES[machine]
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _REFUSE), (_LOAD, 0, 0, 0)]
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _REFUSE)]
    for number in calls.values():
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    program += [(_RETURN, 0, 0, _ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    filters = struct.pack("@HP", len(program), ctypes.addressof(code))
    _check(_libc().prctl(_SECCOMP, _FILTER, filters, 0, 0), "seccomp")


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
