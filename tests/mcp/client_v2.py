"""The `mcp` 2.x client of PyPI: python client_v2.py URL, or python client_v2.py CASULO [ARGS...]

With a URL the token is in CASULO_TOKEN."""

import asyncio
import os
import sys
from contextlib import asynccontextmanager

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from checks import check


@asynccontextmanager
async def connect():
    if sys.argv[1].startswith("http"):
        headers = {"Authorization": "Bearer " + os.environ["CASULO_TOKEN"]}
        async with httpx2.AsyncClient(headers=headers, timeout=120) as http:
            async with Client(streamable_http_client(sys.argv[1], http_client=http)) as client:
                yield client
    else:
        server = StdioServerParameters(command=sys.argv[1], args=sys.argv[2:], env=dict(os.environ))
        async with Client(stdio_client(server)) as client:
            yield client


async def main():
    async with connect() as client:
        # A server that first has to start an emulated host answers the client's probe too late, and is
        # then taken for one of the older revision.
        if "--connect" in sys.argv or sys.argv[1].startswith("http"):
            assert client.protocol_version == "2026-07-28", client.protocol_version

        async def call(name, arguments):
            result = await client.call_tool(name, arguments)
            return result.structured_content, result.content[0].text, result.is_error

        await check((await client.list_tools()).tools, call)


asyncio.run(main())
