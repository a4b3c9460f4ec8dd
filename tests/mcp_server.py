"""An MCP server of the `mcp` package, with three tools.

python mcp_server.py
"""

from __future__ import annotations

import os

from mcp.server.fastmcp import FastMCP

server = FastMCP("numbers", log_level="ERROR")


@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("out of order")


@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(0)


if __name__ == "__main__":
    server.run()
