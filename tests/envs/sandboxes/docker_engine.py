"""A Docker engine for the tests: the one that answers, or one installed and started for these tests alone.

Where the tests run as root on Debian or Ubuntu and nothing answers, `docker.io` is installed and `dockerd` started in a
temporary folder. A keeper process of its own holds it: it stops the engine, unmounts what is left and removes the
folder as soon as no test process that uses it lives, however that one ended. Several pytest workers share one engine.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path

import docker
import requests

from sao_gym.envs.sandboxes.launch import default_signal

INSTALL = ("apt-get", "-o", "DPkg::Lock::Timeout=300", "-qq", "-y", "--no-install-recommends", "install")
NETWORK = ("--iptables=false", "--ip6tables=false", "--bridge=none")
DATA_BYTES = 3 << 30
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0


@cache
def missing_engine() -> str | None:
    """Why no engine can be had here, None once one answers: DOCKER_HOST then names it for this process."""
    if _answers():
        return None
    if os.environ.get("DOCKER_HOST"):
        return f"no Docker engine answers at DOCKER_HOST={os.environ['DOCKER_HOST']}"
    if sys.platform != "linux" or os.geteuid() != 0:
        return "no Docker engine answers, and only root can start one (run as root, or set DOCKER_HOST)"
    with _locked(_folder().with_suffix(".lock")):
        if reason := _install():
            return reason
        return None if _answers() else _join()


def _answers(url: str | None = None) -> bool:
    try:
        client = docker.DockerClient(base_url=url) if url else docker.from_env()
        with closing(client):
            return bool(client.ping())
    except (docker.errors.DockerException, requests.RequestException):
        return False


def _install() -> str | None:
    if shutil.which("dockerd"):
        return None
    if shutil.which("apt-get") is None:
        return "no Docker engine answers, and there is no apt-get to install docker.io with"
    for command in (("apt-get", "-qq", "update"), (*INSTALL, "docker.io")):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
        if done.returncode and "install" in command:
            return f"no Docker engine answers, and docker.io could not be installed: {done.stderr.strip()[-200:]}"
    return None if shutil.which("dockerd") else "docker.io was installed, but there is no dockerd"


def _folder() -> Path:
    """Where the engine of this test session lives; the workers of one pytest-xdist run have it in common."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"alone-{os.getpid()}")
    return Path(tempfile.gettempdir()) / f"sao-gym-engine-{session[:16]}"


def _join() -> str | None:
    folder = _folder()
    users = folder / "users"
    users.mkdir(parents=True, exist_ok=True)
    (users / str(os.getpid())).touch()
    if not (folder / "ready").exists():
        log = (folder / "keeper.log").open("ab")
        subprocess.Popen([sys.executable, __file__, str(folder)], stdout=log, stderr=log, start_new_session=True)
    until = time.monotonic() + START_TIMEOUT_S
    while not (folder / "ready").exists():
        if time.monotonic() > until or (folder / "failed").exists():
            log = folder / "engine.log"
            return f"dockerd did not start: {log.read_text()[-300:] if log.exists() else 'no log'}"
        time.sleep(0.05)
    os.environ["DOCKER_HOST"] = f"unix://{folder}/docker.sock"
    return None


def leave_engine() -> None:
    """Say that this process needs the engine no longer; the last one waits until nothing of it is left."""
    folder = _folder()
    if missing_engine.cache_info().currsize == 0 or not folder.exists():
        return
    with suppress(OSError):
        (folder / "users" / str(os.getpid())).unlink()
    if not _living_users(folder):
        until = time.monotonic() + STOP_TIMEOUT_S
        while folder.exists() and time.monotonic() < until:
            time.sleep(0.05)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------- the keeper, a process of its own


def keep(folder: Path) -> None:
    """Run an engine in `folder` for as long as somebody uses it, then remove every trace of it."""
    _mount_data(folder / "data")
    for number in set(range(1, 65)) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        default_signal(number)  # what make or nohup left ignored would be so in every container
    with (folder / "engine.log").open("ab") as log:
        engine = subprocess.Popen(_engine_command(folder), stdout=log, stderr=log, start_new_session=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # not before: the engine would inherit it
        signal.signal(number, signal.SIG_IGN)
    try:
        if _wait_until_up(folder, engine):
            (folder / "ready").touch()
            while engine.poll() is None and _living_users(folder):
                time.sleep(0.2)
        else:
            (folder / "failed").touch()
            time.sleep(1.0)  # the one who waits reads the log first
    finally:
        _stop(engine)
        _unmount(folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".lock").unlink(missing_ok=True)


def _mount_data(data: Path) -> None:
    """Keep images and containers in memory: fast to make and to remove, and no test can fill this machine's disk."""
    data.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DATA_BYTES},mode=711", "data", str(data)], check=False)


def _engine_command(folder: Path) -> list[str]:
    places = ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
    return ["dockerd", *places, "-H", f"unix://{folder}/docker.sock", *NETWORK]


def _wait_until_up(folder: Path, engine: "subprocess.Popen[bytes]") -> bool:
    until = time.monotonic() + START_TIMEOUT_S
    while engine.poll() is None and time.monotonic() < until:
        if _answers(f"unix://{folder}/docker.sock"):
            return True
        time.sleep(0.1)
    return False


def _living_users(folder: Path) -> list[str]:
    try:
        names = os.listdir(folder / "users")  # noqa: PTH208
    except OSError:
        return []
    return [name for name in names if Path(f"/proc/{name}").exists()]


def _stop(engine: "subprocess.Popen[bytes]") -> None:
    engine.terminate()
    with suppress(subprocess.TimeoutExpired):
        engine.wait(STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(engine.pid, signal.SIGKILL)  # containerd too, should it have stayed
    engine.wait()


def _unmount(folder: Path) -> None:
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for place in sorted((m for m in mounts if m.startswith(f"{folder}/")), key=len, reverse=True):
        subprocess.run(["umount", "-l", place], capture_output=True, check=False)


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
