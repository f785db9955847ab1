"""How a sandbox with a shell is started on this machine: bubblewrap over an unpacked root folder, or over the host's /usr.

Of the host a command sees the root folder that it was given, or /usr and the interpreter read-only. What it writes goes
to a file system in memory that ends with the box. It looks like root inside and is nobody outside: no capabilities, no
further namespaces, a filter of system calls, no network.
"""

import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sao_gym.envs.sandboxes.bubblewrap import LESSER_USER, find_bwrap, launched, readable, system_view
from sao_gym.envs.sandboxes.cgroups import EXTRA_PROCESSES
from sao_gym.envs.sandboxes.channel import driver_argv
from sao_gym.envs.sandboxes.seccomp import filter_program
from sao_gym.envs.sandboxes.spec import SandboxSpec
from sao_gym.errors import ConfigError, SandboxUnavailableError

STATE = "/dev/shm/.sao-gym"
"""The driver's own folder inside."""
USERS = {"": (0, "/root"), "root": (0, "/root"), "nobody": (65534, "/tmp")}
PASSWD = "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/tmp:/bin/bash\n"
GROUP = "root:x:0:\nnogroup:x:65534:\n"
NAMES = {"/etc/passwd": PASSWD, "/etc/group": GROUP, "/etc/hosts": "127.0.0.1 localhost box\n"}


def check_spec(spec: SandboxSpec) -> None:
    """Raises ConfigError for what this backend cannot do, SandboxUnavailableError for a root folder that is not there."""
    if spec.network:
        raise ConfigError("the local sandbox has no network; use a container for network=True")
    if spec.user not in USERS:
        raise ConfigError(f"user of a local sandbox is {spec.user!r}; give root or nobody")
    if spec.image and not (Path(spec.image, "bin/bash").exists() or Path(spec.image, "usr/bin/bash").exists()):
        raise SandboxUnavailableError(
            f"no root folder with bash was found at {spec.image!r}; give the path of an unpacked root file system"
        )


@contextmanager
def shell_command(
    spec: SandboxSpec, joins: Sequence[str], data_fd: int
) -> Iterator[tuple[Sequence[str], Sequence[int]]]:
    """(argv, file descriptors to pass on) that start a box whose first process is the shell that takes commands.

    Raises SandboxUnavailableError.
    """
    with ExitStack() as stack:
        rules = filter_program()
        # Inside, so that this box alone is counted: the limit belongs to a user of one namespace.
        most = spec.limits.processes + EXTRA_PROCESSES
        setup = f"ulimit -u {most}"
        files = (
            {} if spec.image else {name: stack.enter_context(readable(text.encode())) for name, text in NAMES.items()}
        )
        argv = [find_bwrap(), *_isolation(spec), *(_root_view(spec.image) if spec.image else _host_view())]
        argv += _common_view(spec, files)
        filters = [stack.enter_context(readable(rules))] if rules else []
        argv += [text for number in filters for text in ("--seccomp", str(number))]
        argv += ["--chdir", "/", "--", *driver_argv(data_fd=data_fd, state=STATE, setup=setup, processes=most)]
        yield launched(_plan(spec, argv, joins)), (*files.values(), *filters)


def _plan(spec: SandboxSpec, argv: Sequence[str], joins: Sequence[str]) -> Mapping[str, object]:
    limits, is_root = spec.limits, os.geteuid() == 0
    bounds = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_DATA: limits.memory_bytes,
        resource.RLIMIT_NOFILE: 4096,
        resource.RLIMIT_MEMLOCK: 1 << 16,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    return {
        "uid": LESSER_USER if is_root else 0,
        "folders": [] if spec.image else _interpreter(),
        "owned": [os.path.realpath(spec.image)] if spec.image else [],
        "scratch": limits.disk_bytes,
        "rooms": ["upper", "layer", "tmp", "shm", "root", "run", "var", "work"],
        "joins": list(joins),
        "bounds": bounds,
        "argv": argv,
    }


def _interpreter() -> list[str]:
    """Folders of the running interpreter that /usr does not hold."""
    folder = os.path.realpath(sys.base_prefix)
    return [] if Path(folder).is_relative_to("/usr") else [folder]


def _isolation(spec: SandboxSpec) -> list[str]:
    uid, _ = USERS[spec.user]
    spaces = [f"--unshare-{name}" for name in ("user", "ipc", "pid", "net", "uts", "cgroup-try")]
    identity = ["--uid", str(uid), "--gid", str(uid), "--hostname", "box", "--cap-drop", "ALL"]
    return [*spaces, *identity, "--disable-userns", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]


def _root_view(image: str) -> list[str]:
    folder = os.path.realpath(image)
    return ["--overlay-src", f"{{{folder}}}", "--overlay", "{scratch}/upper", "{scratch}/layer", "/"]


def _host_view() -> list[str]:
    view = [*system_view(), "--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
    for folder in _interpreter():
        view += ["--ro-bind", f"{{{folder}}}", folder]
    for room, place in (("root", "/root"), ("run", "/run"), ("var", "/var")):
        view += ["--bind", f"{{scratch}}/{room}", place]
    return view


def _common_view(spec: SandboxSpec, files: Mapping[str, int]) -> list[str]:
    _, home = USERS[spec.user]
    view = [
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--bind",
        "{scratch}/shm",
        "/dev/shm",
        "--bind",
        "{scratch}/tmp",
        "/tmp",
    ]
    for name, number in files.items():
        view += ["--ro-bind-data", str(number), name]
    if spec.image:
        view += ["--dir", spec.workdir]
    else:
        view += ["--bind", "{scratch}/work", spec.workdir]
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    if not spec.image and _interpreter():
        path = f"{path}:{_interpreter()[0]}/bin"
    for name, value in {"PATH": path, "HOME": home, "LANG": "C.UTF-8", "SHELL": "/bin/bash", "TERM": "dumb"}.items():
        view += ["--setenv", name, value]
    read_only = ["/proc", "/dev"] if spec.image else ["/proc", "/dev", "/"]
    return view + [text for place in read_only for text in ("--remount-ro", place)]
