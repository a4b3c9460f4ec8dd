"""An MCP server with three tools, or with a tool that does nothing for each given name.

python mcp_server.py
python mcp_server.py --only NAME …
"""

from __future__ import annotations

import os
import sys

try:
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
except ImportError:  # their names in version 1
    from mcp.server.fastmcp import FastMCP as MCPServer
    from mcp.server.fastmcp.exceptions import ToolError

server = MCPServer("numbers", log_level="ERROR")


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


def fail() -> str:
    """Fails."""
    raise ToolError("out of order")


def leave() -> str:
    """Ends the server."""
    os._exit(0)


def nothing() -> None:
    """Does nothing."""


if __name__ == "__main__":
    if sys.argv[1:2] == ["--only"]:
        for name in sys.argv[2:]:
            server.add_tool(nothing, name=name)
    else:
        for tool in (multiply, fail, leave):
            server.add_tool(tool)
    server.run()
