"""Labels that say who holds a container, and the removal of those whose holder is dead.

A label is on a container from the moment it exists, so there is no time at which one could be lost. Containers of a
living owner, and of owners that cannot be seen from here (another machine on the same engine), are never touched.

Example:
    removed = reap(docker.from_env().api)
"""

from typing import Any

from sao_gym.envs.sandboxes.owner import is_alive, owner, parse_owner

OWNER = "sao-gym.owner"
RUN = "sao-gym.run"
EPISODE = "sao-gym.episode"
_GONE = (404, 409)


def labels(*, run: str = "", episode: str = "") -> dict[str, str]:
    """Labels of a container that this process holds."""
    return {OWNER: str(owner()), RUN: run, EPISODE: episode}


def held(api: Any, *, is_ours: bool = False) -> list[tuple[str, str]]:
    """(id, owner) of sao-gym's containers in any state: all on this engine, or those of this process."""
    wanted = f"{OWNER}={owner()}" if is_ours else OWNER
    return [(each["Id"], each["Labels"][OWNER]) for each in api.containers(all=True, filters={"label": wanted})]


def reap(api: Any) -> list[str]:
    """Remove the containers of dead owners, with their unnamed volumes; ids of those removed."""
    dead = []
    for name, text in held(api):
        holder = parse_owner(text)
        if holder is not None and not is_alive(holder):
            dead.append(name)
    return [name for name in dead if remove_container(api, name)]


def remove_own(api: Any) -> list[str]:
    """Remove every container of this process; ids of those removed."""
    return [name for name, _ in held(api, is_ours=True) if remove_container(api, name)]


def remove_container(api: Any, name: str) -> bool:
    """Kill and remove a container with its unnamed volumes; False where it was gone, or going, already."""
    from docker.errors import APIError

    try:
        api.remove_container(name, v=True, force=True)
    except APIError as error:
        if error.status_code in _GONE:
            return False
        raise
    return True
