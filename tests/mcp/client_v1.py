"""The `mcp` 1.x client of PyPI over stdio: python client_v1.py CASULO [ARGS...]"""

import asyncio
import os
import sys

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from checks import check


async def main():
    server = StdioServerParameters(command=sys.argv[1], args=sys.argv[2:], env=dict(os.environ))
    async with stdio_client(server) as (read, write):
        async with ClientSession(read, write) as session:
            await session.initialize()

            async def call(name, arguments):
                result = await session.call_tool(name, arguments)
                return result.structuredContent, result.content[0].text, result.isError

            await check((await session.list_tools()).tools, call)


asyncio.run(main())
