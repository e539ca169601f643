"""A proxy that keeps clients from reaching any other machine."""

import asyncio
from contextlib import suppress


class BlockingProxy:
    """Tunnels to this machine only; refuses other requests and keeps their first lines."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        """The first line of each request to anyone else."""

    async def __aenter__(self) -> "BlockingProxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that make a client use this proxy."""
        port = self._server.sockets[0].getsockname()[1]
        names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        proxies = dict.fromkeys((*names, *(name.lower() for name in names)), f"http://127.0.0.1:{port}")
        return proxies | {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            asked = (await reader.readline()).decode().strip()
            if not asked.startswith("CONNECT 127.0.0.1:"):
                self.asked.append(asked)
            else:  # from a client that sends everything to its proxy, whatever NO_PROXY says
                await reader.readuntil(b"\r\n\r\n")
                await _tunnel(reader, writer, int(asked.split()[1].rpartition(":")[2]))
        writer.close()


async def _tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    inner, outer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
    async with asyncio.TaskGroup() as ways:
        ways.create_task(_copy(reader, outer))
        ways.create_task(_copy(inner, writer))


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while part := await source.read(1 << 16):
        target.write(part)
        await target.drain()
    target.close()
