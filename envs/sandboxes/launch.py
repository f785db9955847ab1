"""Starts bubblewrap where it needs a hand: as a user who is not root when the host user is, with a bounded disk in memory.

A program of its own (standard library only), run in the place of bubblewrap and replaced by it; its only argument is
the plan as JSON. What it mounts stands in a private mount namespace that ends with the box, so nothing is left to remove:

    uid      who bubblewrap runs as, 0 to stay (RLIMIT_NPROC binds inside only for a user who is not root)
    folders  shown to that user at a place of their own (an interpreter under /root), read-only where `argv` says so
    owned    as `folders`, and what root owns in them belongs to that user (an idmapped mount, where the kernel can)
    scratch  bytes of a file system in memory with the empty folders `rooms`, shown as `{scratch}`; 0 for none
    joins    cgroup.procs files to join
    bounds   resource limits by number
    argv     the program; `{folder}` in it stands for where a folder is shown
"""

import ctypes
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442  # the same numbers on x86_64 and aarch64
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH, MOUNT_ATTR_IDMAP = 1, 4, 0x100000
PR_SET_PDEATHSIG = 1
RT_SIGACTION = {"x86_64": 13, "aarch64": 134}
LAST_SIGNAL = 64
PLACES = ("/mnt", "/media", "/srv", "/opt")
FILES = 500_000


def check(result: int, doing: str) -> int:
    """The result of a C call. Raises OSError where it failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{doing}: {os.strerror(ctypes.get_errno())}")
    return result


def libc() -> ctypes.CDLL:
    """The C library, with errno kept."""
    return ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount by system call. Raises OSError."""
    texts = [text.encode() for text in (source, target, kind)]
    check(libc().mount(*texts, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def write(path: str, text: str) -> None:
    """Write a file of the kernel's."""
    Path(path).write_text(text, encoding="ascii")


def enter_namespace(uid: int, scratch: int) -> int:
    """A mount namespace of one's own, with a user namespace around it where mounting is not allowed otherwise.

    Returns who to become in it: a user namespace of one's own has nobody else.
    """
    user, group = os.geteuid(), os.getegid()
    if libc().unshare(CLONE_NEWNS) != 0:
        flags = (CLONE_NEWNS | CLONE_NEWUSER) if scratch else CLONE_NEWNS
        check(libc().unshare(flags), "unshare")
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"0 {user} 1")
        write("/proc/self/gid_map", f"0 {group} 1")
        uid = 0
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    return uid


def namespace_for(uid: int) -> int:
    """Descriptor of a user namespace in which `uid` is root's name for mounts."""
    ready, ready_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        libc().unshare(CLONE_NEWUSER)
        os.write(ready_end, b"x")
        signal.pause()
    try:
        os.read(ready, 1)
        write(f"/proc/{pid}/uid_map", f"0 {uid} 1")
        write(f"/proc/{pid}/gid_map", f"0 {uid} 1")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(ready_end)


def show_owned(source: int, place: str, uid: int) -> None:
    """Bind a folder so that what root owns there belongs to `uid`. Raises OSError where kernel or file system cannot."""
    call = libc().syscall
    space = namespace_for(uid)
    tree = check(call(OPEN_TREE, source, b"", OPEN_TREE_CLONE | AT_EMPTY_PATH | os.O_CLOEXEC), "open_tree")
    attributes = struct.pack("=QQQQ", MOUNT_ATTR_IDMAP, 0, 0, space)
    check(call(MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, attributes, len(attributes)), "mount_setattr")
    check(call(MOVE_MOUNT, tree, b"", AT_FDCWD, place.encode(), MOVE_MOUNT_F_EMPTY_PATH), "move_mount")
    os.close(tree)
    os.close(space)


def show_folders(base: str, sources: Mapping[str, int], owned: Sequence[str], uid: int) -> dict[str, str]:
    """Bind each folder to a place that anyone can reach; returns folder -> place."""
    shown = {}
    for number, (folder, source) in enumerate(sources.items()):
        place = f"{base}/{number}"
        Path(place).mkdir()
        try:
            if folder not in owned or not uid:
                raise OSError
            show_owned(source, place, uid)
        except OSError:
            mount(f"/proc/self/fd/{source}", place, "", MS_BIND | MS_REC)
        shown[folder] = place
    return shown


def make_scratch(base: str, size: int, rooms: Sequence[str], uid: int) -> str:
    """A file system in memory with empty folders; returns its place."""
    place = f"{base}/scratch"
    Path(place).mkdir()
    mount("tmpfs", place, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=755,size={size},nr_inodes={FILES}")
    for name in rooms:
        Path(place, name).mkdir()
        os.chown(Path(place, name), uid, uid)
    os.chown(place, uid, uid)
    return place


def end_with_caller() -> None:
    """End when the caller does, also if it is gone by now: then nobody holds the other end of stdin."""
    check(libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    poll = select.poll()
    poll.register(0, 0)
    if any(event & select.POLLHUP for _, event in poll.poll(0)):
        os._exit(1)


def default_signal(number: int) -> None:
    """Let a signal do what it does by default: what is ignored stays so in every program that is started from here.

    Python ignores two, nohup one, and some makes those two that the C library keeps to itself and will not set.
    """
    call = RT_SIGACTION.get(platform.machine())
    if call is not None:
        check(libc().syscall(call, number, bytes(32), None, 8), f"signal {number}")
    elif number in signal.valid_signals():
        signal.signal(number, signal.SIG_DFL)


def main(plan: Mapping[str, Any]) -> NoReturn:
    """Do what the plan says and become its program."""
    end_with_caller()
    for path in plan.get("joins", ()):
        write(path, str(os.getpid()))
    argv, owned = plan["argv"], plan.get("owned", ())
    program = os.open(argv[0], os.O_RDONLY)
    uid = enter_namespace(plan["uid"], plan.get("scratch", 0))
    sources = {folder: os.open(folder, os.O_PATH) for folder in [*plan["folders"], *owned]}
    base = next(place for place in PLACES if Path(place).is_dir())
    mount("tmpfs", base, "tmpfs", 0, "mode=755,size=64k")
    shown = show_folders(base, sources, owned, uid)
    if plan.get("scratch"):
        shown["scratch"] = make_scratch(base, plan["scratch"], plan["rooms"], uid)
    for source in sources.values():
        os.close(source)
    for number, bound in plan.get("bounds", {}).items():
        with suppress(ValueError, OSError):  # never above a limit that already holds
            resource.setrlimit(int(number), (bound, bound))
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    end_with_caller()  # again: whoever changes users is forgotten by the kernel
    for number in set(range(1, LAST_SIGNAL + 1)) - {signal.SIGKILL, signal.SIGSTOP}:
        default_signal(number)
    os.execve(program, [fill(text, shown) for text in argv], {})


def fill(text: str, shown: Mapping[str, str]) -> str:
    """`{folder}` or `{folder}/below` with the place where the folder is shown."""
    name, brace, rest = text[1:].partition("}")
    return shown[name] + rest if brace and text.startswith("{") and name in shown else text


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
