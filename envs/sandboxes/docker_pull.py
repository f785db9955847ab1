"""Fetch images into a Docker engine, one after another, and say how far each one is.

An engine keeps the layers that came whole, so an image that was cut off goes on where it was. What failed is told apart: a
registry that lets no more pass for now, an image that is not there, and a network that failed, which is tried again.

Example:
    with open_engine(PULL_S) as client:
        fetched = pull(client, "swebench/sweb.eval.x86_64.pallets_1776_flask-5014:latest")
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from sao_gym.envs.sandboxes.docker_images import tagged

PULL_S = 300.0
"""Longest silence of an engine that fetches; it says something about every layer all the time."""
_LIMITED = re.compile(r"too ?many ?requests|rate limit|\b429\b", re.I)
_ABSENT = re.compile(r"not found|manifest unknown|access denied|does not exist|name unknown|unauthorized", re.I)


class PullProblem(Enum):
    """Why an image did not come."""

    LIMITED = "the registry lets no more pass for now"
    ABSENT = "the registry has no such image"
    FAILED = "it failed on the way"


class PullError(Exception):
    """An image that did not come, for one of the reasons."""

    def __init__(self, problem: PullProblem, said: str) -> None:
        super().__init__(f"{problem.value}: {' '.join(said.split())[-200:]}")
        self.problem = problem


@dataclass(slots=True)
class Layers:
    """What an engine has said of an image's layers so far: bytes that it fetches, and has fetched, by layer."""

    total: dict[str, int] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)

    @property
    def bytes_done(self) -> int:
        """Compressed bytes that came over the network."""
        return sum(self.done.values())

    @property
    def bytes_total(self) -> int:
        """Compressed bytes of the layers that were begun."""
        return sum(self.total.values())

    def note(self, event: dict[str, Any]) -> None:
        """Take in one thing that the engine said."""
        layer, detail = str(event.get("id") or ""), event.get("progressDetail") or {}
        status = str(event.get("status") or "")
        if status == "Downloading" and detail.get("current") is not None:
            self.done[layer] = int(detail["current"])
            self.total[layer] = max(int(detail.get("total") or 0), self.done[layer])
        elif status in ("Download complete", "Pull complete") and layer in self.total:
            self.done[layer] = self.total[layer]


def pull(client: Any, name: str, *, registry: str = "", on_progress: Callable[[Layers], None] | None = None) -> int:
    """Fetch one image under its own name, from `registry` (host and port of a mirror) or its own one.

    Returns the compressed bytes that came; layers that were there already, and such as come at one go, count as 0. Raises PullError.
    """
    from docker.errors import APIError, DockerException

    short = tagged(name)
    source = f"{registry.rstrip('/')}/{short}" if registry else name
    repository, tag = _parts(source)
    layers = Layers()
    try:
        for event in _events(client, repository, tag):
            if said := event.get("error"):
                raise PullError(_problem(str(said)), str(said))
            layers.note(event)
            if on_progress is not None:
                on_progress(layers)
        if registry:
            own, own_tag = _parts(short)
            client.api.tag(f"{repository}:{tag}", own, own_tag)
            client.api.remove_image(f"{repository}:{tag}", noprune=True)
    except APIError as error:
        said = str(error.explanation or error)
        raise PullError(PullProblem.LIMITED if error.status_code == 429 else _problem(said), said) from error
    except (DockerException, OSError) as error:
        raise PullError(PullProblem.FAILED, str(error)) from error
    return layers.bytes_done


def _events(client: Any, repository: str, tag: str) -> Iterator[dict[str, Any]]:
    """What the engine says while it fetches; a stream that is cut off ends in PullError."""
    try:
        yield from client.api.pull(repository, tag=tag, stream=True, decode=True)
    except (ValueError, AttributeError) as error:  # half a line of JSON
        raise PullError(PullProblem.FAILED, f"the engine's answer broke off ({error})") from error


def _problem(said: str) -> PullProblem:
    if _LIMITED.search(said):
        return PullProblem.LIMITED
    return PullProblem.ABSENT if _ABSENT.search(said) else PullProblem.FAILED


def _parts(name: str) -> tuple[str, str]:
    """Repository and tag; a digest counts as a tag, as the engine's interface has it."""
    if "@" in name:
        repository, _, digest = name.partition("@")
        return repository, digest
    head, colon, tag = name.rpartition(":")
    return (head, tag) if colon and "/" not in tag else (name, "latest")
