"""A server whose tools refuse arguments that they do not have; the SDK drops them without a word."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.types import CallToolResult, InputRequiredResult, TextContent, Tool

from mpctl.core.errors import ErrorDocument, InputError, Issue
from mpctl.spec.names import full_name


class StrictServer(MCPServer[Any]):
    """An MCPServer; `additionalProperties` is false in the schema of every tool."""

    async def list_tools(self) -> list[Tool]:
        """The tools with their schemas."""
        tools = await super().list_tools()
        for tool in tools:
            tool.input_schema = {**tool.input_schema, "additionalProperties": False}
        return tools

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Any, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """Call a tool; raises ToolError where there is none. Unknown arguments come back as mpctl.error/1."""
        known: Mapping[str, Any] = arguments
        for tool in await super().list_tools():
            if tool.name == name:
                known = tool.input_schema["properties"]
        issues = [
            Issue("unknown-argument", key, f"{name} has no such argument", _hint(key, known))
            for key in arguments
            if key not in known
        ]
        return refusal(InputError(issues)) if issues else await super().call_tool(name, arguments, context)


def refusal(error: InputError) -> CallToolResult:
    """Refused input as the result of a tool: mpctl.error/1, every issue with its way out."""
    document: ErrorDocument = {"schema": "mpctl.error/1", "issues": [issue.as_dict() for issue in error.issues]}
    text = TextContent(type="text", text=json.dumps(document))
    return CallToolResult(content=[text], structured_content={**document}, is_error=True)


def _hint(key: str, known: Mapping[str, Any]) -> str:
    """Where a setting of a job goes; for other names the tool's arguments."""
    if "settings" in known and "." in (setting := full_name(key)):
        return f'use settings: {{"{setting}": ...}}'
    return f"its arguments: {', '.join(known)}"
