"""A port on this machine's loopback that leads to a unix socket: for a sandbox without network.

It needs nothing but Python's own library, and runs by itself: `python forwarder.py 8765 /run/gateway.sock`. The socket
is mounted into the sandbox; the agent inside is given the address http://127.0.0.1:8765 + the episode's path.
"""

import asyncio
import sys


async def forward(port: int, path: str) -> None:
    """Listen on 127.0.0.1:port until cancelled; every connection gets one to the unix socket at `path`."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except OSError:
            writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(path)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))
        far_writer.close()
        writer.close()

    server = await asyncio.start_server(connect, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(forward(int(sys.argv[1]), sys.argv[2]))
