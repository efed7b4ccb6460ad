"""`mpctl mcp` spoken to by the SDK's own client over a real pipe."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

pytest.importorskip("mcp", reason="the extra `mcp` is not installed")

from mcp import Client, StdioServerParameters
from mcp.types import CallToolResult

from mpctl.cli.mcp.tools import Tools

QUESTIONS = json.loads((Path(__file__).parents[2] / "recorded/mcp_questions.json").read_text("utf-8"))
LLAMA = {"model": "llama-3-70b", "gpus": "64xh100", "settings": {"parallel.tp": 8, "parallel.pp": 8}}


def with_client(use: Callable[[Client], Awaitable[None]], *arguments: str) -> None:
    """Start a server with these arguments, and give its client to `use`."""

    async def main() -> None:
        server = StdioServerParameters(command=sys.executable, args=["-m", "mpctl", "mcp", *arguments])
        with anyio.fail_after(200):
            async with Client(server) as client:
                await use(client)

    anyio.run(main)


def content(result: CallToolResult) -> Any:
    """What structured content and text say alike."""
    (text,) = result.content
    assert json.loads(text.text) == result.structured_content  # type: ignore[union-attr]
    return result.structured_content


def at(document: Any, path: str) -> Any:
    for key in path.split("."):
        document = document[int(key)] if isinstance(document, list) else document[key]
    return document


def test_tools_read_only_and_a_plan_a_refusal_and_a_page() -> None:
    async def use(client: Client) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {"plan", "search", "fit", "explain", "compare", "why", "from_flags", "emit", "presets"} < tools.keys()
        assert "launch" not in tools
        for tool in tools.values():
            assert tool.description and tool.annotations is not None
            assert tool.annotations.read_only_hint and not tool.annotations.open_world_hint
        plan = content(await client.call_tool("plan", LLAMA))
        assert plan["command"].startswith("mpctl plan --model=llama-3-70b") and plan["exit_code"] == 0
        time = plan["document"]["time"]
        assert time["low_seconds"] < time["step_seconds"] < time["high_seconds"] and "ranks" not in plan["document"]
        refused = await client.call_tool("plan", {"model": "gpt2", "gpus": "8xh100", "settings": {"parallel.tp": 8}})
        assert refused.is_error and content(refused)["schema"] == "mpctl.error/1"
        assert content(refused)["issues"][0]["rule"] == "tp-divides-heads"
        found = content(await client.call_tool("schema", {"find": "gradient clipping"}))
        assert list(found["document"]) == ["training.clip_norm"]
        first = content(await client.call_tool("schema", {}))
        text = ""
        for number in range(first["pages"]):
            page = await client.call_tool("page", {"result": first["result"], "page": number + 1})
            text += content(page)["text"]
        assert json.loads(text)["title"] == "mpctl job" and first["pages"] > 1
        none = await client.call_tool("page", {"result": first["result"], "page": 99})
        assert none.is_error and content(none)["issues"][0]["rule"] == "no-page"

    with_client(use)


def test_an_agents_words_are_never_options_or_a_shells() -> None:
    async def use(client: Client) -> None:
        for arguments in ({"job": "--html=/tmp/x"}, {"model": "$(touch x); --html"}, {"settings": {"--html": "x"}}):
            result = await client.call_tool("plan", arguments)
            assert result.is_error and content(result)["schema"] == "mpctl.error/1", arguments
        wrong = await client.call_tool("search", {"top": "many"})
        assert wrong.is_error and "top" in wrong.content[0].text  # type: ignore[union-attr]
        launch = await client.call_tool("launch", {"job": "demo", "run_dir": "x"})
        assert launch.is_error
        dropped = await client.call_tool("search", {"model": "gpt2", "global_batch_size": 512, "speed": 1})
        assert dropped.is_error
        assert [(issue["where"], issue["hint"][:44]) for issue in content(dropped)["issues"]] == [
            ("global_batch_size", 'use settings: {"training.global_batch_size":'),
            ("speed", "its arguments: job, settings, model, gpus, r"),
        ]
        wrong = await client.call_tool("plan", {"model": "gpt2", "gpus": "8xh100", "keys": ["time", "cost"]})
        assert wrong.is_error and [issue["message"] for issue in content(wrong)["issues"]] == [
            "the document has no 'cost'"
        ]
        names = ["time.cost", "time.step", "memory.speed"]
        wrong = await client.call_tool("explain", {"model": "gpt2", "gpus": "8xh100", "figures": names})
        assert wrong.is_error and len(content(wrong)["issues"]) == 2

    with_client(use)


@pytest.mark.slow
def test_twenty_calls_at_once_one_that_is_cancelled_and_progress() -> None:
    async def use(client: Client) -> None:
        found: dict[int, Any] = {}
        told: list[float] = []

        async def call(number: int) -> None:
            arguments = {"model": "gpt2", "settings": {"training.micro_batch_size": number}}
            said = content(await client.call_tool("plan", arguments))
            found[number] = said["document"]["training"]["micro_batch_size"]

        async def progress(seconds: float, total: float | None, message: str | None) -> None:
            told.append(seconds)

        with anyio.move_on_after(3) as scope:
            await client.call_tool("search", {"model": "llama-3-70b", "gpus": "2048xh100"}, progress_callback=progress)
        assert scope.cancelled_caught and told
        async with anyio.create_task_group() as tasks:
            for number in range(1, 21):
                tasks.start_soon(call, number)
        assert found == {number: number for number in range(1, 21)}

    with_client(use)


def test_a_run_that_fails_comes_back_with_its_document(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ended(*_: Any, **__: Any) -> Any:
        said = {"schema": "mpctl.run/2", "failure": {"rank": 0}}
        return subprocess.CompletedProcess([], 1, json.dumps(said).encode(), b"")

    async def told(*_: Any) -> None:
        pass

    monkeypatch.setattr(anyio, "run_process", ended)
    ctx: Any = SimpleNamespace(report_progress=told)
    result = anyio.run(partial(Tools().launch, ctx, run_dir="x", job="demo"))
    assert result.is_error and content(result)["document"]["failure"] == {"rank": 0}


def test_launch_is_there_where_it_is_allowed() -> None:
    async def use(client: Client) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert tools["launch"].annotations is not None and not tools["launch"].annotations.read_only_hint

    with_client(use, "--allow-launch")


@pytest.mark.slow
def test_the_tools_answer_questions_whose_answers_are_known() -> None:
    """25 questions that an agent would be asked; most answers are by hand."""
    assert len(QUESTIONS) == 25

    async def use(client: Client) -> None:
        for row in QUESTIONS:
            said = content(await client.call_tool(row["tool"], row["arguments"]))
            assert at(said.get("document", said), row["path"]) == row["answer"], row

    with_client(use)
