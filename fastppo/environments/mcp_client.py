"""A session with an MCP server that runs as a subprocess. This needs the package `mcp`."""

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

from fastppo.data.datasets import DataError

try:
    from mcp import MCPError
except ImportError:  # its name in version 1
    from mcp import McpError as MCPError

START_TIMEOUT = 30.0
"""Seconds for a server to start and list its tools."""


class _HideParseErrors(logging.Filter):
    """Drop the package's traceback for each line of a server that is not a message.

    `Server` reports such lines in its error message.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return "Failed to parse JSONRPC message" not in record.getMessage()


logging.getLogger("mcp.client.stdio").addFilter(_HideParseErrors())


class Server:
    """A server process and the session with it.

    Args:
        command: a shell command. The server inherits environment variables and working directory.
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
        self._wrote_other_lines = False
        """Whether the server wrote a line to stdout that is not a message."""

    def tools(self) -> list[dict[str, Any]]:
        """Start the server and list its tools in the protocol's format.

        Raises:
            DataError: the server does not start or does not follow the protocol.
        """
        self._started()
        return self._tools

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its text.

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
        answer = _in_protocol_format(result)
        text = "\n".join(block["text"] for block in answer["content"] if block["type"] == "text")
        if answer["isError"]:
            raise RuntimeError(text)
        return text

    def close(self) -> None:
        """Stop the server. The next call starts it again."""
        self._portal = None
        self._open.close()

    def _started(self) -> BlockingPortal:
        """Return the event loop of the session, which runs in its own thread."""
        if self._portal is None:
            try:
                self._start()
            except (OSError, MCPError, TimeoutError, RuntimeError, ValueError) as error:
                # RuntimeError and ValueError: the answer does not follow the protocol.
                self.close()
                reason = str(error).partition("\n")[0]
                reason = reason or f"no list of its tools within {START_TIMEOUT:g} s"
                if self._wrote_other_lines:
                    reason += "; stdout must have messages only, and logs belong on stderr"
                raise DataError(f"{self.command} does not start an MCP server: {reason}") from error
        assert self._portal is not None
        return self._portal

    def _start(self) -> None:
        portal = self._open.enter_context(start_blocking_portal())
        enter = portal.wrap_async_context_manager
        read, write = self._open.enter_context(enter(stdio_client(self.parameters)))
        session = ClientSession(read, write, message_handler=self._on_message)
        self._session = self._open.enter_context(enter(session))
        self._tools = portal.call(_list_tools, self._session)
        self._portal = portal

    async def _on_message(self, message: Any) -> None:
        """Note the parse error of a line that is not a message."""
        if isinstance(message, Exception):
            self._wrote_other_lines = True


async def _list_tools(session: ClientSession) -> list[dict[str, Any]]:
    """Initialize a session and list the tools of all pages."""
    with anyio.fail_after(START_TIMEOUT):
        await session.initialize()
        page = _in_protocol_format(await session.list_tools())
        tools = page["tools"]
        while page["nextCursor"] is not None:
            params = PaginatedRequestParams(cursor=page["nextCursor"])
            page = _in_protocol_format(await session.list_tools(params=params))
            tools += page["tools"]
    return tools


def _in_protocol_format(message: Any) -> dict[str, Any]:
    """Return a message with the protocol's names. The package's names differ between versions."""
    return message.model_dump(by_alias=True)
