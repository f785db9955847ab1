"""A small e2b service for the tests: its control plane, and the daemon in each sandbox, for the SDK's own client.

The daemon's interface is the SDK's own: the server classes that its wheel carries. A sandbox is a folder of this machine
that bubblewrap shows as `/`, so each has its files, its processes and no network. Its root has the rights that a machine
of its own would give: only harmless commands belong here.
"""

import asyncio
import base64
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.parse
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process import process_connect, process_pb
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from sao_gym.envs.sandboxes.bubblewrap import find_bwrap
from sao_gym.envs.sandboxes.launch import default_signal

KEY = "e2b_0000"
TEMPLATES = ("base", "no-account")
FIRST_UID = 70000
SHOWN = ("/usr", "/etc/alternatives", "/etc/ld.so.cache", os.path.realpath(sys.base_prefix))
PATH = f"/usr/local/bin:/usr/bin:/bin:{os.path.realpath(sys.base_prefix)}/bin"
MODE = {"tmp": 0o1777, "proc": 0o755, "dev": 0o755, "etc": 0o755, "home": 0o755, "root": 0o700}


class Machine:
    """One sandbox."""

    def __init__(self, number: int, body: Mapping[str, Any]) -> None:
        self.id = f"i{uuid.uuid4().hex[:12]}"
        self.token = uuid.uuid4().hex
        self.body = body
        self.uid = FIRST_UID + number
        self.folder = Path(tempfile.mkdtemp(prefix="e2b-stand-in-"))
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self.timer: asyncio.TimerHandle | None = None
        self._fill()

    def _fill(self) -> None:
        self.folder.chmod(0o755)
        for name, mode in MODE.items():
            (self.folder / name).mkdir()
            (self.folder / name).chmod(mode)
        for name in ("lib", "lib64", "bin", "sbin"):
            (self.folder / name).symlink_to(f"usr/{name}")
        accounts = {"root": (0, "/root")}
        if os.geteuid() == 0 and self.body["templateID"] == "base":  # another account needs another uid
            accounts["user"] = (self.uid, "/home")
        lines = [f"{name}:x:{uid}:{uid}::{home}:/bin/bash\n" for name, (uid, home) in accounts.items()]
        (self.folder / "etc/passwd").write_text("".join(lines))
        (self.folder / "etc/group").write_text("".join(f"{name}:x:{uid}:\n" for name, (uid, _) in accounts.items()))
        self.uids = {name: uid for name, (uid, _) in accounts.items()}

    def argv(self, user: str, command: Sequence[str]) -> list[str]:
        """`command` in this sandbox as `user`."""
        view = ["--bind", str(self.folder), "/", "--proc", "/proc", "--dev", "/dev"]
        for path in SHOWN:
            view += ["--ro-bind-try", path, path]
        spaces = ["--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        if self.body.get("allow_internet_access") is False:
            spaces.append("--unshare-net")
        if os.geteuid() != 0:
            spaces += ["--unshare-user", "--uid", "0", "--gid", "0"]
        uid = str(self.uids[user])
        change = ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups"] if uid != "0" else []
        plain = ["--die-with-parent", "--new-session", "--cap-add", "ALL", "--clearenv", "--setenv", "PATH", PATH]
        return [find_bwrap(), *view, *spaces, *plain, "--chdir", "/", "--", *change, *command]

    async def run(self, user: str, command: Sequence[str], data: bytes = b"") -> tuple[int, bytes, bytes]:
        """(exit code, stdout, stderr) of a short command."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*self.argv(user, command), stdin=pipe, stdout=pipe, stderr=pipe)
        out, err = await process.communicate(data)
        return process.returncode or 0, out, err

    async def end(self) -> None:
        """End every process and remove the files."""
        if self.timer is not None:
            self.timer.cancel()
        for process in list(self.processes.values()):
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Processes(process_connect.Process):
    """The daemon's processes, each of the sandbox that a request's headers name."""

    def __init__(self, service: "StandIn") -> None:
        self.service = service

    async def start(self, request: Any, ctx: Any) -> AsyncIterator[Any]:
        """Run one process; what it says as a stream of events."""
        machine = self.service.machine(ctx.request_headers)
        config, pipe = request.process, asyncio.subprocess.PIPE
        argv = machine.argv(user_of(ctx.request_headers), [config.cmd, *config.args])
        process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, stderr=pipe)
        machine.processes[process.pid] = process
        try:
            yield event("start", process_pb.ProcessEvent.StartEvent(pid=process.pid))
            said: asyncio.Queue[Any] = asyncio.Queue(4)
            readers = [
                asyncio.create_task(pump(stream, name, said))
                for name, stream in (("stdout", process.stdout), ("stderr", process.stderr))
            ]
            for _ in readers:
                while (chunk := await said.get()) is not None:
                    yield event("data", process_pb.ProcessEvent.DataEvent(output=chunk))
            code = await process.wait()
            yield event("end", process_pb.ProcessEvent.EndEvent(exit_code=code, exited=True, status=f"exit {code}"))
        finally:
            machine.processes.pop(process.pid, None)
            with suppress(ProcessLookupError):
                process.kill()

    async def send_input(self, request: Any, ctx: Any) -> Any:
        """Bytes for a process's stdin."""
        process = self.service.machine(ctx.request_headers).processes.get(request.process.selector.value)
        if process is None or process.stdin is None:
            raise ConnectError(Code.NOT_FOUND, "process not found")
        process.stdin.write(request.input.input.value)
        with suppress(ConnectionError):
            await process.stdin.drain()
        return process_pb.SendInputResponse()


async def pump(stream: Any, name: str, said: "asyncio.Queue[Any]") -> None:
    """Chunks of one stream, and None at its end."""
    while data := await stream.read(32768):
        await said.put(Oneof(name, data))
    await said.put(None)


def event(name: Any, value: Any) -> Any:
    """One event of a process."""
    return process_pb.StartResponse(event=process_pb.ProcessEvent(event=Oneof(name, value)))


def user_of(headers: Any) -> str:
    """The account that a request asks for."""
    given = headers.get("authorization", "").removeprefix("Basic ")
    return base64.b64decode(given).decode().rstrip(":") or "user"


class StandIn:
    """The service: `machines` are those that run; `requests` counts those to the control plane by method and path."""

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.started = 0
        self.requests: list[str] = []
        self.url = ""
        self.loop: asyncio.AbstractEventLoop | None = None

    def machine(self, headers: Any) -> Machine:
        """The sandbox that a request is for."""
        found = self.machines.get(headers.get("e2b-sandbox-id", ""))
        if found is None:
            raise ConnectError(Code.UNAVAILABLE, "the sandbox was not found")
        if headers.get("x-access-token") != found.token:
            raise ConnectError(Code.UNAUTHENTICATED, "the token is wrong")
        return found

    def app(self) -> Starlette:
        """Control plane and daemon under one address."""
        daemon = process_connect.ProcessASGIApplication(Processes(self))
        return Starlette(
            routes=[
                Route("/v2/sandboxes", self.make, methods=["POST"]),
                Route("/v2/sandboxes", self.list, methods=["GET"]),
                Route("/sandboxes/{id}", self.end, methods=["DELETE"]),
                Route("/sandboxes/{id}/timeout", self.prolong, methods=["POST"]),
                Route("/health", self.health),
                Route("/files", self.files, methods=["GET", "POST"]),
                Mount(daemon.path, daemon),
            ]
        )

    def _refusal(self, request: Request) -> Response | None:
        self.requests.append(f"{request.method} {request.url.path}")
        return None if request.headers.get("x-api-key") == KEY else error(401, "Invalid API key")

    async def make(self, request: Request) -> Response:
        """A new sandbox."""
        self.loop = asyncio.get_running_loop()
        if refusal := self._refusal(request):
            return refusal
        body = await request.json()
        if body["templateID"] not in TEMPLATES:
            return error(404, f"template '{body['templateID']}' not found")
        machine = Machine(self.started, body)
        self.started += 1
        self.machines[machine.id] = machine
        self._set_timer(machine, body.get("timeout", 15))
        return JSONResponse({**described(machine), "envdAccessToken": machine.token}, status_code=201)

    def _set_timer(self, machine: Machine, seconds: float) -> None:
        if machine.timer is not None:
            machine.timer.cancel()
        loop = asyncio.get_running_loop()
        machine.timer = loop.call_later(seconds, lambda: loop.create_task(self.remove(machine.id)))

    async def remove(self, name: str) -> bool:
        """End one; false where there is none."""
        machine = self.machines.pop(name, None)
        if machine is not None:
            await machine.end()
        return machine is not None

    async def list(self, request: Request) -> Response:
        """Those whose metadata are as asked for."""
        if refusal := self._refusal(request):
            return refusal
        asked = urllib.parse.parse_qsl(urllib.parse.unquote(request.query_params.get("metadata", "")))
        wanted = {(name, urllib.parse.unquote(value)) for name, value in asked}
        found = [each for each in self.machines.values() if wanted <= set(each.body["metadata"].items())]
        return JSONResponse([described(each) for each in found])

    async def end(self, request: Request) -> Response:
        """End a sandbox."""
        if refusal := self._refusal(request):
            return refusal
        is_gone = await self.remove(request.path_params["id"])
        return Response(status_code=204) if is_gone else error(404, "sandbox not found")

    async def prolong(self, request: Request) -> Response:
        """Give a sandbox so many seconds from now on."""
        if refusal := self._refusal(request):
            return refusal
        machine = self.machines.get(request.path_params["id"])
        if machine is None:
            return error(404, "sandbox not found")
        self._set_timer(machine, (await request.json())["timeout"])
        return Response(status_code=204)

    async def health(self, request: Request) -> Response:
        """Whether a sandbox runs."""
        is_there = request.headers.get("e2b-sandbox-id") in self.machines
        return Response(status_code=204) if is_there else error(502, "The sandbox was not found")

    async def files(self, request: Request) -> Response:
        """Read or write one file, as the sandbox sees it."""
        try:
            machine = self.machine(request.headers)
        except ConnectError as refusal:
            return error(502, f"The sandbox was not found ({refusal})")
        path, user = request.query_params["path"], request.query_params.get("username", "user")
        if request.method == "GET":
            code, data, said = await machine.run(user, ["cat", "--", path])
            status = 404 if b"No such file" in said else 400
            chunks = iter([data[at : at + 65536] for at in range(0, len(data), 65536)])
            return error(status, said.decode()) if code else StreamingResponse(chunks)
        script = 'mkdir -p -- "${1%/*}/" && exec cat >"$1"'
        code, _, said = await machine.run(user, ["bash", "-c", script, "bash", path], await request.body())
        if code:
            return error(500, said.decode())
        return JSONResponse([{"name": path.rpartition("/")[2], "type": "file", "path": path}])

    async def shut(self) -> None:
        """End every sandbox."""
        for name in list(self.machines):
            await self.remove(name)


def described(machine: Machine) -> dict[str, Any]:
    """A sandbox as the control plane tells of it."""
    times = {"startedAt": "2026-01-01T00:00:00Z", "endAt": "2026-01-01T01:00:00Z"}
    size = {"cpuCount": 2, "memoryMB": 512, "diskSizeMB": 1024, "state": "running"}
    names = {"templateID": machine.body["templateID"], "sandboxID": machine.id, "clientID": "c", "envdVersion": "0.6.4"}
    return {**names, **times, **size, "metadata": machine.body["metadata"]}


def error(status: int, message: str) -> Response:
    """An answer as the service's own."""
    return Response(json.dumps({"code": status, "message": message}), status, media_type="application/json")


@contextmanager
def no_signal_ignored() -> Iterator[None]:
    """As on a machine of its own: a sandbox's processes would inherit what make or nohup left ignored here."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    mask = next(int(line.partition(":")[2], 16) for line in lines if line.startswith("SigIgn"))
    ignored = {number for number in range(1, 65) if mask >> (number - 1) & 1}
    ignored -= {signal.SIGPIPE, signal.SIGXFSZ}  # by Python, which lets its children have them
    for number in ignored - signal.valid_signals():
        default_signal(number)  # those that the C library keeps to itself
    for number in ignored & signal.valid_signals():
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        yield
    finally:
        for number in ignored & signal.valid_signals():
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def serving() -> Iterator[StandIn]:
    """The service at an address of this machine, in a thread; it and its sandboxes end with the context."""
    service = StandIn()
    with no_signal_ignored(), socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(service.app(), lifespan="off", log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        service.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="e2b-stand-in")
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.005)
            yield service
        finally:
            if service.loop is not None and thread.is_alive():
                asyncio.run_coroutine_threadsafe(service.shut(), service.loop).result(30)
            server.should_exit = True
            thread.join(30)


def environment(service: StandIn) -> dict[str, str]:
    """What sends the SDK to a stand-in."""
    return {
        "E2B_API_KEY": KEY,
        "E2B_API_URL": service.url,
        "E2B_SANDBOX_URL": service.url,
        "E2B_HTTP_VERSION": "1.1",
    }
