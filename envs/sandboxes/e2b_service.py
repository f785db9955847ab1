"""The e2b service: its SDK imported when it is first needed, its errors in our words, its sandboxes labelled and reaped.

The service is e2b.dev's, or the one that E2B_DOMAIN (or E2B_API_URL and E2B_SANDBOX_URL) names; E2B_API_KEY opens it.
A sandbox that nobody prolongs is ended by the service itself, so the death of its owner costs its lifetime at most.

Example:
    machine = await create(SandboxSpec(image="my-template"), lifetime_s=300)
    await machine.kill()
"""

import asyncio
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sao_gym.envs.sandboxes.channel import driver_argv
from sao_gym.envs.sandboxes.finish import finish
from sao_gym.envs.sandboxes.owner import is_alive, owner, parse_owner
from sao_gym.envs.sandboxes.spec import SandboxSpec
from sao_gym.errors import SandboxError, SandboxUnavailableError, SaoGymError

MISSING_PACKAGE = "the package e2b is not installed, and the e2b sandbox needs it: pip install 'sao-gym[e2b]'"
MISSING_KEY = (
    "the e2b sandbox needs a key: set E2B_API_KEY, and E2B_DOMAIN (or E2B_API_URL and E2B_SANDBOX_URL) for a service of "
    "your own"
)
KIND, OWNER, EPISODE = "sao-gym", "sao-gym.owner", "sao-gym.episode"
OURS = {KIND: "sandbox"}
USER = "user"
"""The account that e2b's templates have; where one has it not, commands run as root."""


def sdk() -> Any:
    """The SDK's module. Raises SandboxUnavailableError where it, or the key, is not there."""
    try:
        import e2b
    except ImportError as error:
        raise SandboxUnavailableError(MISSING_PACKAGE) from error
    if not os.environ.get("E2B_API_KEY"):
        raise SandboxUnavailableError(MISSING_KEY)
    return e2b


@contextmanager
def translated(template: str = "") -> Iterator[None]:
    """Raises SandboxUnavailableError for what the user must change and SandboxError for all else that the SDK raises."""
    try:
        yield
    except SaoGymError:
        raise
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        e2b = sdk()
        if isinstance(error, e2b.AuthenticationException):
            raise SandboxUnavailableError(f"the e2b service refuses the key in E2B_API_KEY ({said})") from error
        is_refused = isinstance(error, e2b.NotFoundException) or getattr(error, "status_code", None) in (400, 403, 404)
        if template and is_refused:
            raise SandboxUnavailableError(
                f"the e2b service does not start template {template!r} ({said}); give the name of one that your account has"
            ) from error
        raise SandboxError(f"the e2b service failed ({said})") from error


async def create(spec: SandboxSpec, *, lifetime_s: int) -> Any:
    """A new sandbox of the SDK's, labelled from its first moment; none stays where the caller is cancelled meanwhile."""
    e2b = sdk()
    template = spec.image or e2b.AsyncSandbox.default_template
    work = asyncio.ensure_future(
        e2b.AsyncSandbox.create(
            template,
            timeout=lifetime_s,
            metadata={**OURS, OWNER: str(owner()), EPISODE: spec.label},
            allow_internet_access=spec.network,
        )
    )
    with translated(template):
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await finish(_abandon(work))
            raise


async def _abandon(work: "asyncio.Future[Any]") -> None:
    """End a sandbox that came too late."""
    with suppress(Exception):
        await (await work).kill()


async def reap() -> int:
    """End sandboxes of this account whose owner, a process of this machine, is dead; returns how many."""
    e2b = sdk()
    gone = 0
    with translated():
        pages = e2b.AsyncSandbox.list(query=e2b.SandboxQuery(metadata=OURS))
        while pages.has_next:
            for found in await pages.next_items():
                holder = parse_owner(found.metadata.get(OWNER, ""))
                if holder is not None and not is_alive(holder):
                    with suppress(e2b.NotFoundException):
                        gone += await e2b.AsyncSandbox.kill(found.sandbox_id)
    return gone


def start_command(spec: SandboxSpec) -> str:
    """A command for root that becomes the shell which takes commands: process 1 of a namespace, without root's rights.

    Where a sandbox does not allow namespaces, the shell is one process among others: commands can then kill it, and a
    daemon that leaves its command's process group outlives the command's time.
    """
    limits = spec.limits
    setup = f"ulimit -c 0; ulimit -u {limits.processes}; ulimit -f {-(-limits.disk_bytes // 1024)}"
    driver = shlex.join(driver_argv(setup=setup, processes=limits.processes))
    return f"""
u={shlex.quote(spec.user or USER)}
if ! id -u "$u" >/dev/null 2>&1; then
  {"u=root" if not spec.user else 'echo "there is no user $u in this template" >&2; exit 1'}
fi
w={shlex.quote(spec.workdir)}
[ -d "$w" ] || {{ mkdir -p -- "$w" && chown "$u" -- "$w"; }}
h=$(getent passwd "$u" | cut -d: -f6)
set -- setpriv --no-new-privs --inh-caps=-all --bounding-set=-all
[ "$(id -u "$u")" = 0 ] || set -- "$@" --reuid="$(id -u "$u")" --regid="$(id -g "$u")" --init-groups
n="unshare --fork --pid --kill-child --mount-proc"
$n true 2>/dev/null || n=
cd /
exec env -i PATH="$PATH" HOME="${{h:-/tmp}}" LANG=C.UTF-8 TERM=dumb $n "$@" {driver}
"""
