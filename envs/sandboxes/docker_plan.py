"""A spec as a container of Docker's: what it may take, and what it must not have.

Example:
    create = container(SandboxSpec(image="python:3.12-slim"), name="sao-gym-1", run="", argv=["bash"])
    create(docker.from_env().api)
"""

import io
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sao_gym.envs.sandboxes.docker_reaper import labels
from sao_gym.envs.sandboxes.spec import MIB, SandboxSpec, ShellLimits
from sao_gym.errors import SandboxUnavailableError

DEFAULT_IMAGE = "python:3.12-slim"
SHM_BYTES = 64 * MIB
OPEN_FILES = 4096


def container(spec: SandboxSpec, *, name: str, run: str, argv: Sequence[str]) -> Callable[[Any], str]:
    """A function that creates the container of `spec` with an engine's API and returns its id.

    Raises SandboxUnavailableError where the engine has no such image.
    """
    image = spec.image or DEFAULT_IMAGE

    def create(api: Any) -> str:
        facts = _image_facts(api, image)
        user = spec.user or str(facts.get("User") or "")
        is_root = user.partition(":")[0] in ("", "0", "root")
        made = api.create_container(
            image,
            name=name,
            entrypoint=list(argv),
            command=[],
            user=user or None,
            working_dir=spec.workdir if is_root else None,  # made where it is not there
            hostname="sandbox",
            stdin_open=True,  # once: the shell sees the end of its input when the connection is lost
            healthcheck={"test": ["NONE"]},
            labels=labels(run=run, episode=spec.label),
            host_config=host_config(api, spec.limits, network=spec.network, volumes=facts.get("Volumes") or ()),
        )
        if not is_root:
            _open_folder(api, name, spec.workdir)
        return str(made["Id"])

    return create


def _image_facts(api: Any, image: str) -> Mapping[str, Any]:
    from docker.errors import ImageNotFound

    try:
        return dict(api.inspect_image(image)["Config"] or {})
    except ImageNotFound as error:
        raise SandboxUnavailableError(
            f"the Docker engine has no image {image!r}; get it with `docker pull {image}`, or build or import it"
        ) from error


def _open_folder(api: Any, name: str, folder: str) -> None:
    """Let any user write to a folder that the image does not have; the engine makes it for root alone."""
    from docker.errors import NotFound

    try:
        stream, _ = api.get_archive(name, folder)
        next(stream, None)
        stream.close()
    except NotFound:
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            member = tarfile.TarInfo(folder.strip("/"))
            member.type, member.mode = tarfile.DIRTYPE, 0o777
            archive.addfile(member)
        api.put_archive(name, "/", data.getvalue())


def host_config(api: Any, limits: ShellLimits, *, network: bool, volumes: Iterable[str]) -> Any:
    """Bounds and rights: no network, no capabilities, no new privileges, no swap, no log on the engine's disk.

    /tmp and what the image calls volumes are in memory, so no volume is ever made. One such folder takes at most half
    of the memory, so that files alone cannot cost the shell its life.
    """
    from docker.types import LogConfig

    size = min(limits.disk_bytes, limits.memory_bytes // 2)
    return api.create_host_config(
        mem_limit=limits.memory_bytes,
        memswap_limit=limits.memory_bytes,
        pids_limit=limits.processes,
        nano_cpus=int(limits.cpus * 1e9),
        shm_size=min(SHM_BYTES, limits.disk_bytes, limits.memory_bytes // 4),
        ulimits=_ulimits(limits),
        network_mode="bridge" if network else "none",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        ipc_mode="private",
        log_config=LogConfig(type="none"),
        tmpfs=dict.fromkeys(("/tmp", *volumes), f"rw,nosuid,nodev,exec,mode=1777,size={size}"),
    )


def _ulimits(limits: ShellLimits) -> list[Any]:
    from docker.types import Ulimit

    bounds = {"core": 0, "nofile": OPEN_FILES, "fsize": limits.disk_bytes, "memlock": 64 * 1024, "msgqueue": 819200}
    return [Ulimit(name=name, soft=bound, hard=bound) for name, bound in bounds.items()]
