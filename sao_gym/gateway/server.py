"""Serving an application on a loopback port or a unix socket, inside the running event loop.

Example:
    async with served(app, port=0) as address:
        print(address.url)
"""

import asyncio
import contextlib
import ipaddress
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sao_gym.errors import ConfigError

KEEP_ALIVE_S = 600
"""Longer than an agent thinks or acts between two calls: a connection closed meanwhile looks like a failed call."""
BACKLOG = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a gateway listens: on a port, or on a unix socket (`uds`), whose clients name any host."""

    host: str = "127.0.0.1"
    port: int | None = None
    uds: Path | None = None

    @property
    def url(self) -> str:
        """Base of all its addresses."""
        if self.port is None:
            return "http://localhost"
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


@asynccontextmanager
async def served(
    app: Any, *, host: str = "127.0.0.1", port: int = 0, uds: str | os.PathLike[str] | None = None, mode: int = 0o600
) -> AsyncIterator[Address]:
    """Serve `app` meanwhile. `mode` is that of the unix socket. Raises ConfigError for addresses that others reach."""
    try:
        import uvicorn
    except ImportError as error:
        raise ConfigError("the gateway needs starlette and uvicorn: pip install 'sao-gym[gateway]'") from error

    class Server(uvicorn.Server):
        """Signals are the program's own affair."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    with _listening(host, port, uds, mode) as (listener, address):
        config = uvicorn.Config(
            app,
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        server = Server(config)
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            yield address
        finally:
            server.should_exit = True
            await task


@contextlib.contextmanager
def _listening(
    host: str, port: int, uds: str | os.PathLike[str] | None, mode: int
) -> Iterator[tuple[socket.socket, Address]]:
    if uds is None:
        with _tcp(host, port) as listener:
            yield listener, Address(host=host, port=int(listener.getsockname()[1]))
        return
    path = Path(uds)
    with _unix(path, mode) as listener:
        try:
            yield listener, Address(uds=path)
        finally:
            path.unlink(missing_ok=True)


def _tcp(host: str, port: int) -> socket.socket:
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError as error:
        raise ConfigError(f"host must be a loopback address such as 127.0.0.1, got {host!r}") from error
    if not address.is_loopback:
        raise ConfigError(
            f"the gateway listens on loopback or a unix socket alone, got host {host!r}: what runs elsewhere or in a "
            "sandbox reaches it through a unix socket (uds=...) and the forwarder"
        )
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        return socket.create_server((str(address), port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"the gateway cannot listen on {host} port {port}: {error.strerror}") from error


def _unix(path: Path, mode: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o777 & ~mode)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"the gateway cannot listen on {path}: {error}") from error
    finally:
        os.umask(before)
    return listener
