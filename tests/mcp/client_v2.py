"""The `mcp` 2.x client of PyPI over stdio: python client_v2.py CASULO [ARGS...]"""

import asyncio
import os
import sys

from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from checks import check


async def main():
    server = StdioServerParameters(command=sys.argv[1], args=sys.argv[2:], env=dict(os.environ))
    async with Client(stdio_client(server)) as client:

        async def call(name, arguments):
            result = await client.call_tool(name, arguments)
            return result.structured_content, result.content[0].text, result.is_error

        await check((await client.list_tools()).tools, call)


asyncio.run(main())
