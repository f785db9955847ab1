# ruff: noqa: PTH101, PTH106, PTH108, PTH116, PTH123, PTH208
"""The program inside a sandbox: a small parent that forks one Python process per session and never trusts it.

It stands alone: standard library only, nothing of sao-gym, so that the file can be handed into an empty box. The
parent is process 1 of the box. It reads frames from the host on file descriptor 0 and answers each with one frame:

    run    (id, timeout_s; body = code)  -> status ok | timeout | died, truncated, head; body = output
    reset  (id)                          -> status clean; every other process is gone, /tmp and /dev/shm are empty

A frame is two big-endian uint32 lengths, a JSON header and a body. The session's process gets code over a pipe,
writes to a pipe that stands behind its fds 1 and 2, and says the cell's number when it is done. Whatever it writes
there can at most spoil its own output. On any doubt the parent exits, and the host throws the box away.
"""

import ast
import builtins
import ctypes
import gc
import json
import linecache
import os
import resource
import select
import signal
import stat
import struct
import sys
import time
import traceback
import types
from contextlib import suppress
from typing import Any, NoReturn

Limits = dict[str, Any]

WATCH_INTERVAL_S = 0.05
IDLE_WATCH_INTERVAL_S = 0.5
PIPE_BYTES = 1 << 20
MAX_FRAME_BYTES = 64 << 20
MAX_FILES = 20_000
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36


def read_exactly(fd: int, count: int) -> bytes:
    """Read `count` bytes, or raise EOFError."""
    parts = []
    while count:
        part = os.read(fd, min(count, PIPE_BYTES))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


# ---------------------------------------------------------------- the session's process


class Cells:
    """Runs cells in one namespace, as a REPL would."""

    def __init__(self) -> None:
        self.module = types.ModuleType("__main__")
        self.names = self.module.__dict__
        self.names["__builtins__"] = builtins
        sys.modules["__main__"] = self.module

    def run(self, number: int, code: str) -> None:
        """Run one cell; its text, value and traceback go to fd 1."""
        name = f"<cell {number}>"
        linecache.cache[name] = (len(code), None, [line + "\n" for line in code.split("\n")], name)
        try:
            body, last = self._compile(code, name)
            if body is not None:
                exec(body, self.names)
            if last is not None:
                self._show(eval(last, self.names))
        except BaseException as error:
            self._flush()
            try:
                text = self._traceback(error)
            except BaseException:
                text = type(error).__name__ + "\n"
            self._emit(text)
        self._flush()

    def _compile(self, code: str, name: str) -> tuple[types.CodeType | None, types.CodeType | None]:
        tree = ast.parse(code, name)
        last = None
        if tree.body and isinstance(ending := tree.body[-1], ast.Expr):
            tree.body.pop()
            last = compile(ast.Expression(ending.value), name, "eval")
        return (compile(tree, name, "exec") if tree.body else None), last

    def _show(self, value: object) -> None:
        if value is not None:
            self.names["_"] = value
            text = repr(value)
            self._flush()
            self._emit(text + "\n")

    def _traceback(self, error: BaseException) -> str:
        if isinstance(error, SystemExit):
            return f"SystemExit: {error.code}\n"
        report = traceback.TracebackException.from_exception(error)
        seen: set[int] = set()
        pending: list[traceback.TracebackException | None] = [report]
        while pending:  # a chain of causes may be long, never endless
            part = pending.pop()
            if part is None or id(part) in seen:
                continue
            seen.add(id(part))
            kept = [frame for frame in part.stack if frame.filename.startswith("<cell ")]
            part.stack = traceback.StackSummary.from_list(kept[:3] + kept[-3:] if len(kept) > 6 else kept)
            pending += [part.__cause__, part.__context__]
        return "".join(report.format())

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with suppress(BaseException):  # the cell may have replaced or closed it
                stream.flush()  # type: ignore[union-attr]

    def _emit(self, text: str) -> None:
        with suppress(OSError):  # the cell closed its own output
            write_all(1, text.encode("utf-8", "backslashreplace"))


def set_limits(limits: Limits, isolated: bool) -> None:
    """Set this process's own limits; children inherit them and cannot raise them."""
    bounds = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_CPU: limits["cpu_s"],
        resource.RLIMIT_FSIZE: limits["tmp_bytes"],
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
    }
    if isolated:  # outside, this would count all of the user's processes
        bounds[resource.RLIMIT_NPROC] = limits["processes"] + 2
    for which, bound in bounds.items():
        hard = resource.getrlimit(which)[1]
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(which, (bound, bound))


def session_main(limits: Limits, isolated: bool, work: str, code_fd: int, done_fd: int) -> NoReturn:
    """Body of the session's process; never returns."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    set_limits(limits, isolated)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    os.chdir(work)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = open(fd, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = [""]
    sys.path.insert(0, work)
    cells = Cells()
    pid = os.getpid()
    while True:
        number, size = struct.unpack(">II", read_exactly(code_fd, 8))
        code = read_exactly(code_fd, size).decode("utf-8", "replace")
        cells.run(number, code)
        if os.getpid() != pid:  # a child that the cell forked and let run on
            os._exit(0)
        write_all(done_fd, struct.pack(">I", number))


# ---------------------------------------------------------------- the parent


class Output:
    """Keeps the first and the last bytes of a stream, and counts the rest."""

    def __init__(self, limit: int) -> None:
        self.head_limit = limit - limit // 2
        self.tail_limit = limit // 2
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        """Take in more bytes."""
        self.total += len(data)
        room = self.head_limit - len(self.head)
        self.head += data[:room]
        self.tail += data[room:] if room > 0 else data
        if len(self.tail) > 4 * self.tail_limit + PIPE_BYTES:
            self._trim()

    def _trim(self) -> None:
        del self.tail[: max(len(self.tail) - self.tail_limit, 0)]

    def parts(self) -> tuple[bytes, bytes, int]:
        """(head, tail, number of bytes left out between them)."""
        self._trim()
        return bytes(self.head), bytes(self.tail), self.total - len(self.head) - len(self.tail)


class Session:
    """The parent's ends of one session's process."""

    def __init__(self, pid: int, code_fd: int, done_fd: int, output_fd: int) -> None:
        self.pid = pid
        self.code_fd = code_fd
        self.done_fd = done_fd
        self.output_fd = output_fd
        self.exit: int | None = None
        self.reason = ""

    def close(self) -> None:
        """Close the parent's ends."""
        for fd in (self.code_fd, self.done_fd, self.output_fd):
            os.close(fd)


class Parent:
    """Process 1 of the box (or, unisolated, the reaper of everything that it started)."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.limits: Limits = config["limits"]
        self.isolated: bool = config["isolated"]
        self.work: str = config["work"]
        self.folders = [self.work, "/dev/shm"] if self.isolated else [self.work]
        self.session: Session | None = None
        self.is_crowded = False
        libc = ctypes.CDLL(None)
        # Same user inside: without this the session could read and write the parent's memory.
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        if not self.isolated:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 is immune to what it does not handle
        self.host = os.dup(0)
        self.null = os.open("/dev/null", os.O_RDWR)
        os.dup2(self.null, 0)

    # frames

    def read_frame(self) -> tuple[dict[str, Any], bytes]:
        """Read one request; EOF means that the host is gone."""
        header_size, body_size = struct.unpack(">II", read_exactly(self.host, 8))
        if header_size + body_size > MAX_FRAME_BYTES:
            raise EOFError
        header = json.loads(read_exactly(self.host, header_size))
        return header, read_exactly(self.host, body_size)

    def reply(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Answer the host."""
        text = json.dumps(header).encode()
        write_all(self.host, struct.pack(">II", len(text), len(body)) + text + body)

    def serve(self) -> None:
        """Answer frames until the host goes away."""
        self.reply({"id": 0, "status": "ready"})
        os.dup2(self.null, 1)
        os.dup2(self.null, 2)
        while True:
            self.wait_for_host()
            header, body = self.read_frame()
            if header["op"] == "run":
                self.run(header, body)
            else:
                self.reset()
                self.reply({"id": header["id"], "status": "clean"})

    def wait_for_host(self) -> None:
        """Wait for a request; keep an eye on what a cell left running."""
        poll = select.poll()
        poll.register(self.host, select.POLLIN)
        while not poll.poll(IDLE_WATCH_INTERVAL_S * 1000 if self.is_crowded else None):
            self.reap()
            reason = self.excess()
            if reason and self.session is not None:
                self.kill_all()  # the next cell finds its process dead and tells why
                self.session.reason = reason
                self.is_crowded = False

    # the session's process

    def start_session(self) -> Session:
        """Fork the session's process."""
        code_read, code_write = os.pipe()
        done_read, done_write = os.pipe()
        output_read, output_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                code, done = keep_only(code_read, done_write, output_write)
                session_main(self.limits, self.isolated, self.work, code, done)
            os._exit(1)
        for fd in (code_read, done_write, output_write):
            os.close(fd)
        os.set_blocking(output_read, False)
        os.set_blocking(done_read, False)
        os.set_blocking(code_write, False)
        return Session(pid, code_write, done_read, output_read)

    def run(self, header: dict[str, Any], body: bytes) -> None:
        """Run one cell and answer with what it left."""
        if self.session is None:
            self.session = self.start_session()
        output = Output(self.limits["output_bytes"])
        watch = CellWatch(self, self.session, header["id"], body, output)
        status, note = watch.run(header["timeout_s"])
        if status == "ok":
            self.drain(output)
            self.is_crowded = self.usage()[0] > 1 or threads(self.session.pid) > 1
        else:
            self.end_session(output)
        if status == "aborted":
            return  # the host has given up on this cell and asks for something else
        head, tail, left_out = output.parts()
        answer = {
            "id": header["id"],
            "status": status,
            "note": note,
            "truncated": left_out,
            "head": len(head),
        }
        self.reply(answer, head + tail)

    def wait_exit(self, session: Session) -> bool:
        """Give a process that closed its pipe a moment to be reaped."""
        until = time.monotonic() + 1.0
        while session.exit is None and time.monotonic() < until:
            self.reap()
            time.sleep(0.001)
        return session.exit is not None

    def drain(self, output: Output) -> None:
        """Take what stands in the pipe, at most a pipe's worth."""
        taken = 0
        while self.session is not None and taken < PIPE_BYTES:
            data = read_some(self.session.output_fd)
            if not data:
                return
            taken += len(data)
            output.add(data)

    def end_session(self, output: Output | None = None) -> None:
        """End every other process; what they had written is kept in `output`."""
        self.kill_all()
        if self.session is not None:
            if output is not None:
                self.drain(output)
            self.session.close()
            self.session = None
        self.is_crowded = False

    def reset(self) -> None:
        """Make the box as good as new, or exit."""
        self.end_session()
        for folder in self.folders:
            empty_folder(folder)
            if os.listdir(folder):
                os._exit(3)

    # processes

    def reap(self) -> None:
        """Collect the dead."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.note_exit(pid, status)

    def note_exit(self, pid: int, status: int) -> None:
        """Remember how the session's process ended."""
        if self.session is not None and pid == self.session.pid:
            self.session.exit = os.waitstatus_to_exitcode(status)

    def kill_all(self) -> None:
        """End every process but this one; returns when none is left."""
        is_init = os.getpid() == 1
        if is_init:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # from process 1: this pid namespace, all at once, forking or not
        while True:
            if not is_init:
                for pid in self.descendants():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            try:
                # Orphans come to this process, so no child left means no process left.
                pid, status = os.waitpid(-1, 0 if is_init else os.WNOHANG)
            except ChildProcessError:
                return
            if pid:
                self.note_exit(pid, status)
            else:
                time.sleep(0.001)

    def descendants(self) -> list[int]:
        """Process ids below this one, from /proc."""
        children: dict[int, list[int]] = {}
        for pid in numeric(os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/stat", "rb") as file:
                    above = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(above, []).append(pid)
        found: list[int] = []
        pending = [os.getpid()]
        while pending:
            below = children.get(pending.pop(), [])
            found += below
            pending += below
        return found

    def usage(self) -> tuple[int, int]:
        """(number of processes, their resident bytes) of all but this one."""
        pids = numeric(os.listdir("/proc")) if self.isolated else self.descendants()
        pages = 0
        others = [pid for pid in pids if pid != os.getpid()]
        for pid in others:
            try:
                with open(f"/proc/{pid}/statm", "rb") as file:
                    numbers = file.read().split()
                pages += int(numbers[1]) - int(numbers[2])
            except (OSError, IndexError):
                continue
        return len(others), pages * resource.getpagesize()

    def excess(self) -> str:
        """Which bound is broken, as words, or an empty string."""
        count, resident = self.usage()
        if count > self.limits["processes"]:
            return f"more than {self.limits['processes']} processes"
        if resident > self.limits["memory_bytes"]:
            return f"more than {self.limits['memory_bytes'] >> 20} MiB of memory"
        if self.isolated:
            for folder in self.folders:
                figures = os.statvfs(folder)
                if figures.f_files - figures.f_ffree > MAX_FILES:
                    self.kill_all()
                    with suppress(OSError):  # what cannot be removed now costs the box at the next reset
                        empty_folder(folder)
                    return f"more than {MAX_FILES} files in {folder}"
        return ""


def keep_only(code_fd: int, done_fd: int, output_fd: int) -> tuple[int, int]:
    """In a new process: output on 1 and 2, code on 3, done on 4, nothing on 0, everything else closed."""
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.dup2(code_fd, 200)
    os.dup2(done_fd, 201)
    os.closerange(3, 200)
    code, done = os.dup2(200, 3, inheritable=False), os.dup2(201, 4, inheritable=False)
    os.closerange(5, 4096)
    return code, done


class CellWatch:
    """One running cell: feeds the code in, takes the output, and says how it ended."""

    def __init__(self, parent: Parent, session: Session, number: int, code: bytes, output: Output) -> None:
        self.parent = parent
        self.session = session
        self.number = number
        self.pending = memoryview(struct.pack(">II", number, len(code)) + code)
        self.output = output
        self.done = b""
        self.poll = select.poll()
        for fd in (session.output_fd, session.done_fd, parent.host):
            self.poll.register(fd, select.POLLIN)
        self.poll.register(session.code_fd, select.POLLOUT)

    def run(self, timeout_s: float) -> tuple[str, str]:
        """(status, note): ok, timeout, died, or aborted by the host."""
        deadline = time.monotonic() + timeout_s
        next_watch = time.monotonic() + WATCH_INTERVAL_S
        while (now := time.monotonic()) < deadline:
            if now >= next_watch:
                self.parent.reap()
                if self.session.exit is not None:
                    return "died", describe_exit(self.session.exit)
                if reason := self.parent.excess():
                    return "died", reason
                next_watch = time.monotonic() + WATCH_INTERVAL_S
            for fd, event in self.poll.poll(max(min(deadline, next_watch) - now, 0) * 1000):
                if ending := self.handle(fd, event):
                    return ending
        return "timeout", ""

    def handle(self, fd: int, event: int) -> tuple[str, str] | None:
        """Serve one ready descriptor; returns how the cell ended, if it did."""
        if fd == self.parent.host:
            # In the middle of a cell this is a reset, or the end of the host.
            return "aborted", ""
        if fd == self.session.code_fd:
            self.feed(event)
        elif fd == self.session.output_fd:
            data = read_some(fd)
            self.output.add(data)
            if not data:
                self.poll.unregister(fd)  # everyone has closed it
        else:
            return self.hear()
        return None

    def feed(self, event: int) -> None:
        """Write more of the code."""
        if not event & select.POLLERR:
            self.pending = self.pending[write_some(self.session.code_fd, self.pending) :]
        if event & select.POLLERR or not self.pending:
            self.poll.unregister(self.session.code_fd)

    def hear(self) -> tuple[str, str] | None:
        """Read numbers of finished cells; a stranger's number is passed over."""
        data = read_some(self.session.done_fd)
        if not data:
            self.poll.unregister(self.session.done_fd)
            self.parent.wait_exit(self.session)
            return "died", self.session.reason or describe_exit(self.session.exit)
        self.done += data
        while len(self.done) >= 4:
            (value,), self.done = struct.unpack(">I", self.done[:4]), self.done[4:]
            if value == self.number:
                return "ok", ""
        return None


def describe_exit(code: int | None) -> str:
    """An exit status in words."""
    if code is None:
        return "it is gone"
    if code < 0:
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"


def threads(pid: int) -> int:
    """Number of threads of a process."""
    try:
        return os.stat(f"/proc/{pid}/task").st_nlink - 2
    except OSError:
        return 0


def numeric(names: list[str]) -> list[int]:
    """The names that are process ids."""
    return [int(name) for name in names if name.isdigit()]


def read_some(fd: int) -> bytes:
    """Bytes that are there now."""
    try:
        return os.read(fd, 65536)
    except OSError:
        return b""


def write_some(fd: int, data: memoryview) -> int:
    """Number of bytes that went through now."""
    try:
        return os.write(fd, data)
    except OSError:
        return 0


def empty_folder(folder: str) -> None:
    """Remove everything below `folder`, whatever its permissions; symbolic links are not followed."""
    pending = [(folder, False)]
    while pending:
        path, is_listed = pending.pop()
        if is_listed:
            os.rmdir(path)
            continue
        if path != folder:
            pending.append((path, True))
        os.chmod(path, 0o700)
        with os.scandir(path) as entries:
            for entry in entries:
                if stat.S_ISDIR(entry.stat(follow_symlinks=False).st_mode):
                    pending.append((entry.path, False))
                else:
                    os.unlink(entry.path)


def main() -> NoReturn:
    """Start as process 1 of a box; the only argument is the configuration as JSON."""
    config = json.loads(sys.argv[1])
    sys.path += config["paths"]
    for name in config["preload"]:
        __import__(name)
    parent = Parent(config)
    gc.collect()
    gc.freeze()
    try:
        with suppress(EOFError, ConnectionError):  # the host has gone
            parent.serve()
    finally:
        parent.kill_all()
        os._exit(0)


if __name__ == "__main__":
    main()
