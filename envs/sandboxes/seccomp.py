"""A seccomp filter that closes what a namespace leaves open: other processes' memory and limits, and kernel objects
that would outlive an episode (System V memory, message queues, keys, memory files that no limit counts).

The filter is a classic BPF program as bytes (linux/filter.h: `struct sock_filter {u16 code; u8 jt, jf; u32 k}`),
which bubblewrap loads. Denied calls fail with EPERM.
"""

import errno
import platform
import struct

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_OFFSET_NR, _OFFSET_ARCH, _OFFSET_ARGS = 0, 4, 16

# System call numbers (x86_64, aarch64), from asm/unistd.h of each.
_DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
}
_PRLIMIT64 = (302, 261)
_SOCKET = (41, 198)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def _op(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jump_true, jump_false, k)


def filter_program(machine: str | None = None, *, sockets: bool = True) -> bytes | None:
    """The filter for `machine` (this one by default), or None where its call numbers are not known.

    Without `sockets` no new socket can be made, of any family; pairs of them can.
    """
    entry = _ARCHITECTURES.get(machine or platform.machine())
    if entry is None:
        return None
    column, audit_arch = entry
    deny = _op(_RETURN, _ERRNO | errno.EPERM)
    allow = _op(_RETURN, _ALLOW)
    program = [_op(_LOAD, _OFFSET_ARCH), _op(_EQUAL, audit_arch, jump_true=1), deny, _op(_LOAD, _OFFSET_NR)]
    program += [_op(_AT_LEAST, 0x40000000, jump_false=1), deny]  # the x32 calls have numbers of their own
    for numbers in [*_DENIED.values(), *(() if sockets else (_SOCKET,))]:
        program += [_op(_EQUAL, numbers[column], jump_false=1), deny]
    # prlimit64(pid, resource, new, old): reading any limit and setting one's own is allowed.
    program += [_op(_EQUAL, _PRLIMIT64[column], jump_true=1), allow]
    program += [_op(_LOAD, _OFFSET_ARGS), _op(_EQUAL, 0, jump_false=1), allow]
    program += [_op(_LOAD, _OFFSET_ARGS + 16), _op(_EQUAL, 0, jump_false=3)]
    program += [_op(_LOAD, _OFFSET_ARGS + 20), _op(_EQUAL, 0, jump_false=1), allow, deny]
    return b"".join(program)
