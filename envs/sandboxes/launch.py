"""Starts bubblewrap as a user who is not root, when the host user is: only then does RLIMIT_NPROC bind inside.

A program of its own (standard library only), run in the place of bubblewrap and replaced by it. Folders that the
lesser user cannot reach (an interpreter under /root) are shown to it at a place of its own, in a private mount
namespace that ends with the box.
"""

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

CLONE_NEWNS = 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PLACES = ("/mnt", "/media", "/srv", "/opt")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount by system call. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    texts = [text.encode() for text in (source, target, kind)]
    if libc.mount(*texts, ctypes.c_ulong(flags), data.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"mount {target}: {os.strerror(ctypes.get_errno())}")


def show_folders(folders: Sequence[str]) -> dict[str, str]:
    """Bind each folder to a place that anyone can reach; returns folder -> place."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    base = next(place for place in PLACES if Path(place).is_dir())
    sources = [os.open(folder, os.O_PATH) for folder in folders]
    mount("tmpfs", base, "tmpfs", 0, "mode=755,size=64k")
    shown = {}
    for number, (folder, source) in enumerate(zip(folders, sources, strict=True)):
        place = f"{base}/{number}"
        Path(place).mkdir()
        mount(f"/proc/self/fd/{source}", place, "", MS_BIND | MS_REC)
        os.close(source)
        shown[folder] = place
    return shown


def main(uid: int, folders: Sequence[str], argv: Sequence[str]) -> NoReturn:
    """Become `uid` and run `argv`, in which `{folder}` stands for where a folder is shown."""
    program = os.open(argv[0], os.O_RDONLY)
    shown = show_folders(folders)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    arguments = [shown.get(text[1:-1], text) if text.startswith("{") else text for text in argv]
    os.execve(program, arguments, {})


if __name__ == "__main__":
    count = int(sys.argv[2])
    main(int(sys.argv[1]), sys.argv[3 : 3 + count], sys.argv[3 + count :])
