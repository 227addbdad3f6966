"""The `mcp` 1.x client of PyPI: python client_v1.py URL, or python client_v1.py CASULO [ARGS...]

With a URL the token is in CASULO_TOKEN."""

import asyncio
import os
import sys
from contextlib import asynccontextmanager

import httpx
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from driver import drive


@asynccontextmanager
async def connect():
    if sys.argv[1].startswith("http"):
        headers = {"Authorization": "Bearer " + os.environ["CASULO_TOKEN"]}
        async with httpx.AsyncClient(headers=headers, timeout=120) as http:
            async with streamable_http_client(sys.argv[1], http_client=http) as (read, write, _):
                yield read, write
    else:
        server = StdioServerParameters(command=sys.argv[1], args=sys.argv[2:], env=dict(os.environ))
        async with stdio_client(server) as (read, write):
            yield read, write


async def main():
    async with connect() as (read, write):
        async with ClientSession(read, write) as session:
            server = await session.initialize()

            async def call(name, arguments):
                result = await session.call_tool(name, arguments)
                return result.structuredContent, result.content[0].text, result.isError

            tools = [tool.name for tool in (await session.list_tools()).tools]
            version = server.protocolVersion
            await drive({"server": server.serverInfo.name, "protocol": version, "tools": tools}, call)


asyncio.run(main())
