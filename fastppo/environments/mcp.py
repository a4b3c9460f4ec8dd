"""Tools of an MCP server that is started as a process of its own.

environment: mcp:python server.py

Its tools are called like methods (`fastppo.environments.tools`); `rewards` scores the responses.
All episodes of a process share one server, so its tools must not keep state between calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
from typing import Any

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp import ClientSession, StdioServerParameters, stdio_client
from mcp.types import CONNECTION_CLOSED, PaginatedRequestParams

from fastppo.data.rows import DataError

try:
    from mcp import MCPError
except ImportError:  # its name in version 1
    from mcp import McpError as MCPError

START_TIMEOUT = 30.0
"""Seconds in which a server has said which tools it has."""

TAKEN = ("reset", "step", "get_reward", "close", "stop_on", "tool_schemas")
"""Names that mean something else in a class of tools."""


class _InWords(logging.Filter):
    """Holds back what the package logs, with a traceback, of each line of a server that is no
    message: the error of a server that is refused says it in words."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "Failed to parse JSONRPC message" not in record.getMessage()


logging.getLogger("mcp.client.stdio").addFilter(_InWords())


def load_environment(command: str) -> type:
    """A class of tools, those of the server that a command starts.

    Raises:
        DataError: the command starts no server, or one without tools that can be used.
    """
    server = Server(command)
    tools = server.tools()
    try:
        _check_tools(command, tools)
    except DataError:
        server.close()
        raise

    def reset(self: Any) -> None:
        """The prompt is read as it is."""

    async def close(self: Any) -> None:
        """Ends the server."""
        await asyncio.to_thread(server.close)

    members: dict[str, Any] = {tool["name"]: _method(server, tool["name"]) for tool in tools}
    members |= {
        "reset": reset,
        "close": close,
        "stop_on": (ConnectionError,),
        "tool_schemas": {tool["name"]: _schema(tool) for tool in tools},
    }
    return type("mcp", (), members)


class Server:
    """A server, and the session with it.

    Args:
        command: as a shell takes it; the server has the environment and the folder of this process.
    """

    def __init__(self, command: str) -> None:
        if not command.strip():
            raise DataError("expected mcp:COMMAND, got no command")
        self.command = command
        program, *arguments = shlex.split(command)
        self.parameters = StdioServerParameters(
            command=program, args=arguments, env=dict(os.environ)
        )
        self._open = contextlib.ExitStack()
        self._portal: BlockingPortal | None = None
        self._session: ClientSession
        self._tools: list[dict[str, Any]] = []
        self._is_readable = True
        """Whether each line of the server was a message."""

    def tools(self) -> list[dict[str, Any]]:
        """What the server lists, as the protocol has it; starts it.

        Raises:
            DataError: there is no server, or it does not answer as the protocol has it.
        """
        self._started()
        return self._tools

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """What a tool returns, its texts.

        Raises:
            RuntimeError: the tool failed.
            ConnectionError: the server has ended.
        """
        future = self._started().start_task_soon(self._session.call_tool, name, arguments)
        try:
            result = await asyncio.wrap_future(future)
        except MCPError as error:
            if error.error.code == CONNECTION_CLOSED:
                raise ConnectionError(f"the MCP server {self.command} has ended") from error
            raise RuntimeError(error.error.message) from error
        except (anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            raise ConnectionError(f"the MCP server {self.command} has ended") from error
        answer = _on_the_wire(result)
        text = "\n".join(block["text"] for block in answer["content"] if block["type"] == "text")
        if answer["isError"]:
            raise RuntimeError(text)
        return text

    def close(self) -> None:
        """Ends the server, which the next call starts again."""
        self._portal = None
        self._open.close()

    def _started(self) -> BlockingPortal:
        """The loop of the session, in a thread of its own."""
        if self._portal is None:
            try:
                self._start()
            except (OSError, MCPError, TimeoutError, RuntimeError, ValueError) as error:
                # The last two are of an answer that is not as the protocol has it.
                self.close()
                reason = str(error).partition("\n")[0]
                reason = reason or f"no list of its tools within {START_TIMEOUT:g} s"
                if not self._is_readable:
                    reason += "; it writes to stdout what is no message, and logs belong on stderr"
                raise DataError(f"{self.command} does not start an MCP server: {reason}") from error
        assert self._portal is not None
        return self._portal

    def _start(self) -> None:
        portal = self._open.enter_context(start_blocking_portal())
        enter = portal.wrap_async_context_manager
        read, write = self._open.enter_context(enter(stdio_client(self.parameters)))
        session = ClientSession(read, write, message_handler=self._message)
        self._session = self._open.enter_context(enter(session))
        self._tools = portal.call(_list_tools, self._session)
        self._portal = portal

    async def _message(self, message: Any) -> None:
        """Takes what answers no call: a line that is no message comes as the exception on it."""
        if isinstance(message, Exception):
            self._is_readable = False


def _check_tools(command: str, tools: list[dict[str, Any]]) -> None:
    """Raises DataError where there are none, or one whose name means something else."""
    if not tools:
        raise DataError(f"{command}: the MCP server has no tools")
    for tool in tools:
        if tool["name"] in TAKEN or tool["name"].startswith("_"):
            raise DataError(
                f"{command}: the MCP server's tool {tool['name']!r} has a name that is taken"
            )


async def _list_tools(session: ClientSession) -> list[dict[str, Any]]:
    """The tools of a session that has not begun, all pages of them."""
    with anyio.fail_after(START_TIMEOUT):
        await session.initialize()
        page = _on_the_wire(await session.list_tools())
        tools = page["tools"]
        while page["nextCursor"] is not None:
            params = PaginatedRequestParams(cursor=page["nextCursor"])
            page = _on_the_wire(await session.list_tools(params=params))
            tools += page["tools"]
    return tools


def _on_the_wire(message: Any) -> dict[str, Any]:
    """A message under the protocol's own names: the package's are others in each version."""
    return message.model_dump(by_alias=True)


def _method(server: Server, name: str) -> Any:
    async def method(self: Any, **arguments: Any) -> str:
        return await server.call(name, arguments)

    return method


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as a chat template takes it."""
    function = {
        "name": tool["name"],
        "description": tool["description"] or "",
        "parameters": tool["inputSchema"],
    }
    return {"type": "function", "function": function}
