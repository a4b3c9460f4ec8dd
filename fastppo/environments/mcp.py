"""Tools of an MCP server, which runs as a subprocess.

environment: mcp:python server.py

The tools are called as in `fastppo.environments.tools`, and `rewards` scores the responses. All
episodes of a process share one server, so tools must not keep state between calls.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fastppo.data.datasets import DataError
from fastppo.plugins.adapters import Adapter

if TYPE_CHECKING:
    from fastppo.environments.mcp_client import Server

RESERVED = ("reset", "step", "get_reward", "close", "stop_on", "tool_schemas")
"""Names with another meaning in a class of tools."""


def load_environment(command: str) -> type:
    """Start a server and return a class with its tools as methods.

    Raises:
        DataError: the command does not start a server, or its tools cannot be used.
    """
    from fastppo.environments.mcp_client import Server  # imports mcp

    server = Server(command)
    tools = server.tools()
    try:
        _check_tools(command, tools)
    except DataError:
        server.close()
        raise

    def reset(self: Any) -> None:
        """Leave the prompt as it is."""

    async def close(self: Any) -> None:
        """Stop the server."""
        await asyncio.to_thread(server.close)

    members: dict[str, Any] = {tool["name"]: _method(server, tool["name"]) for tool in tools}
    members |= {
        "reset": reset,
        "close": close,
        "stop_on": (ConnectionError,),
        "tool_schemas": {tool["name"]: _schema(tool) for tool in tools},
    }
    return type("mcp", (), members)


def _check_tools(command: str, tools: list[dict[str, Any]]) -> None:
    """Raise DataError if there are no tools, or one has a reserved name."""
    if not tools:
        raise DataError(f"{command}: the MCP server has no tools")
    for tool in tools:
        if tool["name"] in RESERVED or tool["name"].startswith("_"):
            raise DataError(
                f"{command}: the MCP server's tool {tool['name']!r} has a reserved name"
            )


def _method(server: Server, name: str) -> Any:
    async def method(self: Any, **arguments: Any) -> str:
        return await server.call(name, arguments)

    return method


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Convert a tool to the format of chat templates."""
    function = {
        "name": tool["name"],
        "description": tool["description"] or "",
        "parameters": tool["inputSchema"],
    }
    return {"type": "function", "function": function}


ADAPTER = Adapter(requirement="mcp", environment=load_environment)
