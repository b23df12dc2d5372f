#!/usr/bin/env bash
# tool: mcp 2.3.0 (Python SDK of the Model Context Protocol)
# finding: a server ignores an argument that the tool does not have, and runs the tool with its defaults
# last run: 2026-11-28
#
# The schema that the server publishes does not forbid further properties. A client that types jobs= where the tool has
# job= gets the answer for every job, and no error.
. "$(dirname "$0")/lib.sh"
install mcp==2.3.0
cat > "$folder/client.py" <<'PY'
import asyncio, sys

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

SERVER = '''
from mcp.server.mcpserver import MCPServer

server = MCPServer("example")


@server.tool()
def dump(job: str = "every job") -> str:
    """Dump a job."""
    return job


server.run()
'''


async def main():
    parameters = StdioServerParameters(command=sys.executable, args=["-c", SERVER])
    async with stdio_client(parameters) as streams, ClientSession(*streams) as client:
        await client.initialize()
        answer = await client.call_tool("dump", {"jobs": "4711"})
        print("error:", answer.is_error, "- answered for", answer.content[0].text)


asyncio.run(main())
PY
"$python" "$folder/client.py" 2>/dev/null | expect 'error: False - answered for every job'
