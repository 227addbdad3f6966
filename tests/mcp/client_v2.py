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

from driver import drive


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
        async def call(name, arguments):
            result = await client.call_tool(name, arguments)
            return result.structured_content, result.content[0].text, result.is_error

        tools = [tool.name for tool in (await client.list_tools()).tools]
        hello = {"server": client.server_info.name, "protocol": client.protocol_version, "tools": tools}
        await drive(hello, call)


asyncio.run(main())
