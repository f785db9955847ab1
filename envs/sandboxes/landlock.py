"""A wall without namespaces, for machines that allow none: Landlock for files and signals, seccomp for the rest.

A program of its own (standard library only) that takes its rights away and becomes another program. What holds for it
then holds for all that it starts: files can be read where the plan says and written below one folder, no socket can be
made, no process outside can be signalled or looked into, and no capability is left. What does not hold: the names of
other processes can be seen in /proc, and what is written to the folder is bounded for each file only.

The only argument is the plan as JSON: `reads` and `writes` (paths), `filter` (a seccomp program, hex), `argv`.
"""

import ctypes
import errno
import json
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on x86_64 and aarch64
NEEDED_VERSION = 6
"""From this one on (Linux 6.12) signals and abstract sockets are walled, too."""
EXECUTE, READ_FILE, READ_DIR, WRITE_FILE, TRUNCATE = 1 << 0, 1 << 2, 1 << 3, 1 << 1, 1 << 14
ALL_FILES = (1 << 16) - 1
ALL_NET, ALL_SCOPES = 3, 3
READ = EXECUTE | READ_FILE | READ_DIR
FOR_A_FILE = EXECUTE | READ_FILE | WRITE_FILE | TRUNCATE
PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS = 22, 24, 28, 38
CAPABILITIES_VERSION = 0x20080522
SECBIT_NOROOT_LOCKED = 0x3
SOME_CAPABILITIES = 64


def version() -> int:
    """Version of the kernel's Landlock, 0 where there is none."""
    return max(int(ctypes.CDLL(None).syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)), 0)


def check(result: int, doing: str) -> int:
    """The result of a C call. Raises OSError where it failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{doing}: {os.strerror(ctypes.get_errno())}")
    return result


def drop_capabilities(libc: ctypes.CDLL) -> None:
    """No capability is left, and being root gives none back."""
    for number in range(SOME_CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
    libc.prctl(PR_SET_SECUREBITS, SECBIT_NOROOT_LOCKED, 0, 0, 0)  # only root may, and only root needs it
    header = struct.pack("=II", CAPABILITIES_VERSION, 0)
    check(libc.capset(header, bytes(24)), "capset")


def wall_files(libc: ctypes.CDLL, reads: Sequence[str], writes: Sequence[str]) -> None:
    """Nothing but these paths from here on. Raises OSError."""
    rights = struct.pack("=QQQ", ALL_FILES, ALL_NET, ALL_SCOPES)
    ruleset = check(libc.syscall(CREATE_RULESET, rights, ctypes.c_size_t(len(rights)), 0), "landlock_create_ruleset")
    for path, allowed in [*((path, READ) for path in reads), *((path, ALL_FILES) for path in writes)]:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not os.path.isdir(path):  # noqa: PTH112
            allowed &= FOR_A_FILE
        rule = struct.pack("=Qi", allowed, place)
        check(libc.syscall(ADD_RULE, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(place)
    check(libc.syscall(RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def filter_calls(libc: ctypes.CDLL, program: bytes) -> None:
    """Load a seccomp program. Raises OSError."""
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    check(libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0), "seccomp")


def main(plan: Mapping[str, Any]) -> NoReturn:
    """Build the wall and become the plan's program."""
    if version() < NEEDED_VERSION:
        raise OSError(errno.ENOSYS, f"Landlock {NEEDED_VERSION} is needed, this kernel has {version()}")
    libc = ctypes.CDLL(None, use_errno=True)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    wall_files(libc, plan["reads"], plan["writes"])
    drop_capabilities(libc)
    filter_calls(libc, bytes.fromhex(plan["filter"]))
    os.execv(plan["argv"][0], plan["argv"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
