"""The tools of `mpctl mcp`: what an agent says becomes the words of a command, whose JSON is the result.

A job is a preset's name, a job file's path or a table as in a job file; `settings` are keys of a job by full name,
such as {"parallel.tp": 8}. Nothing is written; `launch` is there only if the server was started with --allow-launch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from mcp.server.mcpserver import Context
from mcp.types import CallToolResult, TextContent, ToolAnnotations
from pydantic import Field

from mpctl import __version__
from mpctl.cli.mcp.calls import ANSWERED, Calls
from mpctl.cli.mcp.pages import Pages
from mpctl.cli.mcp.strict import StrictServer, refusal
from mpctl.core.errors import InputError, Issue

Ctx: TypeAlias = Context[Any, Any]
Table: TypeAlias = dict[str, Any]
Job = Annotated[str | Table | None, Field(description="a preset's name, a job file's path, or a job's table")]
Settings = Annotated[
    Table | None,
    Field(description='keys of the job, {"parallel.tp": 8} or {"tp": 8}; a short name where one table alone has it'),
]
Model = Annotated[str | None, Field(description="a model's preset or id: llama-3-70b, Qwen/Qwen2.5-7B")]
Gpus = Annotated[str | None, Field(description="GPUs by count and device: 64xh100, 1xrtx-4090")]
Runtime = Annotated[str | None, Field(description="software that trains: megatron-core, torchtitan, trl, mpctl, ...")]
Keys = Annotated[
    list[str] | None, Field(description="top-level keys of the document to return; * for all; the usual when absent")
]
Tokens = Annotated[str | None, Field(description="tokens of the whole run, 15T: its days, price, energy, failures")]
Price = Annotated[float | None, Field(description="price of a GPU-hour")]

READS = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
TRAINS = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=False, open_world_hint=False)
LONG = frozenset({"ranks", "groups", "front"})
"""Keys that list every rank, or layouts that rows have too: left out unless they are asked for."""

INSTRUCTIONS = """\
mpctl plans and searches parallel layouts of transformer training. Start with `report` (which layout, and why not the
next two?), `search` (all of them), `fit` (will my fine-tuning fit?) or `from_flags` (what will my launch script do?),
then `plan`, `explain`, `compare`. Say a figure with its band (low_seconds, high_seconds) and whether it lies within
what was measured (is_measured: this software, GPU and size, not this very layout); say the command, which a person
can run. An error lists every issue with a way out: change what its hint says."""


def server(*, allow_launch: bool) -> StrictServer:
    """The server with its tools."""
    made = StrictServer("mpctl", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")
    tools = Tools()
    for tool in (
        tools.plan,
        tools.report,
        tools.search,
        tools.fit,
        tools.explain,
        tools.compare,
        tools.why,
        tools.from_flags,
        tools.emit,
        tools.presets,
        tools.schema,
        tools.page,
    ):
        made.add_tool(tool, annotations=READS)
    if allow_launch:
        made.add_tool(tools.launch, annotations=TRAINS)
    return made


class Tools:
    """The tools of one server; the docstring of each is what an agent reads.

    Refused input comes back as mpctl.error/1, every issue with its way out, marked as an error.
    """

    def __init__(self) -> None:
        self._calls, self._pages = Calls(), Pages()

    async def _run(
        self,
        ctx: Ctx,
        command: str,
        words: Sequence[object],
        options: Sequence[str] = ("--json",),
        *,
        keys: Sequence[str] | None = None,
        text: str = "",
    ) -> CallToolResult:
        """Run a command with the agent's own words (None and tables among them count as none), then options."""
        named = [word for word in words if isinstance(word, str)]
        try:
            if wrong := [word for word in named if word.startswith("-")]:
                raise InputError.of("no-option", wrong[0], "stands where no option may", "give settings in `settings`")
            result = await self._calls.run([command, *named, *options], ctx, text=text)
            return _answer(self._pages.short({**result, "document": _chosen(result["document"], keys)}))
        except InputError as error:
            return refusal(error)

    async def plan(
        self,
        ctx: Ctx,
        job: Job = None,
        settings: Settings = None,
        model: Model = None,
        gpus: Gpus = None,
        runtime: Runtime = None,
        tokens: Tokens = None,
        price: Price = None,
        keys: Keys = None,
    ) -> CallToolResult:
        """Plan one layout: whether it is legal and fits, memory by stage, step time with its band, MFU, messages."""
        options = [*_option("tokens", tokens), *_option("price", price), *_job(job, settings, model, gpus, runtime)]
        return await self._run(ctx, "plan", [job], options, keys=keys)

    async def report(
        self,
        ctx: Ctx,
        job: Job = None,
        settings: Settings = None,
        model: Model = None,
        gpus: Gpus = None,
        runtime: Runtime = None,
        tokens: Tokens = None,
        price: Price = None,
    ) -> CallToolResult:
        """Recommend a layout in short: cost, why not the next two, the risk and what it rests on, what to measure."""
        options = [*_option("tokens", tokens), *_option("price", price), *_job(job, settings, model, gpus, runtime)]
        return await self._run(ctx, "report", [job], options)

    async def search(
        self,
        ctx: Ctx,
        job: Job = None,
        settings: Settings = None,
        model: Model = None,
        gpus: Gpus = None,
        runtime: Runtime = None,
        fix: Annotated[Table | None, Field(description='settings that stay as they are: {"tp": 8}')] = None,
        top: Annotated[int, Field(ge=1, le=100)] = 5,
        objective: Literal["tokens", "memory", "cost", "days", "energy"] = "tokens",
        tokens: Tokens = None,
        price: Price = None,
        keys: Keys = None,
    ) -> CallToolResult:
        """Find the fastest layouts that fit, and the plainest of those that estimates cannot tell from it."""
        fixed = [word for key, value in (fix or {}).items() for word in ("--fix", f"{key}={_text(value)}")]
        wanted = [*_option("top", top), *_option("objective", objective), *_option("tokens", tokens)]
        options = [*fixed, *wanted, *_option("price", price), *_job(job, settings, model, gpus, runtime)]
        return await self._run(ctx, "search", [job], options, keys=keys)

    async def fit(
        self,
        ctx: Ctx,
        model: Annotated[str, Field(description="a model's preset or id")],
        gpus: Annotated[str, Field(description="1xrtx-4090, 4xa100-80gb, or any")] = "any",
        samples: Annotated[str | None, Field(description="samples of the data: 50000, 20k")] = None,
        seq_length: int | None = None,
        method: Literal["full", "lora", "qlora"] | None = None,
        runtime: Runtime = None,
        settings: Settings = None,
    ) -> CallToolResult:
        """Say whether a fine-tuning fits: full, LoRA and QLoRA by GPU, memory, time, and the way out where not."""
        wanted = [*_option("samples", samples), *_option("seq-length", seq_length), *_option("method", method)]
        return await self._run(ctx, "fit", [model], [*wanted, *_job(None, settings, None, gpus, runtime)])

    async def explain(
        self,
        ctx: Ctx,
        figures: Annotated[list[str], Field(description="time.mfu, memory.stage-0, ...; [] for all")],
        job: Job = None,
        settings: Settings = None,
        model: Model = None,
        gpus: Gpus = None,
        runtime: Runtime = None,
    ) -> CallToolResult:
        """Show the formula, the numbers and the source of a plan's figures."""
        return await self._run(ctx, "explain", [job, *figures], _job(job, settings, model, gpus, runtime))

    async def compare(
        self,
        ctx: Ctx,
        others: Annotated[list[str], Field(description="jobs, or settings that change the job: tp=4,pp=2")],
        job: Job = None,
        settings: Settings = None,
        model: Model = None,
        gpus: Gpus = None,
        runtime: Runtime = None,
    ) -> CallToolResult:
        """Show plans next to each other: what differs in settings, memory, time and why."""
        return await self._run(ctx, "compare", [job, *others], _job(job, settings, model, gpus, runtime))

    async def why(
        self,
        ctx: Ctx,
        log: Annotated[str, Field(description="the path of a log, or of a run's directory")],
        job: Annotated[str | None, Field(description="the job's file or launch script, where the log has none")] = None,
    ) -> CallToolResult:
        """Say why a run takes as long as it does: its log against its plan, the step by cause, what to check."""
        return await self._run(ctx, "why", [job, log])

    async def from_flags(
        self,
        ctx: Ctx,
        launcher: Annotated[str, Field(description="megatron, megatron-bridge, torchtitan, deepspeed, trl, ...")],
        text: Annotated[str, Field(description="its command line, script or config, as text")],
        gpus: Gpus = None,
        settings: Settings = None,
        keys: Keys = None,
    ) -> CallToolResult:
        """Plan what another launcher's script, flags or config would run; says which of its flags do not count."""
        options = ["--from", launcher, "-", *_job(None, settings, None, gpus)]
        return await self._run(ctx, "plan", [], options, keys=keys, text=text)

    async def emit(
        self,
        ctx: Ctx,
        launcher: Annotated[str, Field(description="megatron, megatron-bridge, torchtitan, trl, axolotl, toml, ...")],
        job: Job = None,
        settings: Settings = None,
        model: Model = None,
        gpus: Gpus = None,
        runtime: Runtime = None,
    ) -> CallToolResult:
        """Write a plan as flags or config of another launcher, or as a job file (toml); differences as notes."""
        return await self._run(ctx, "emit", [job, launcher], _job(job, settings, model, gpus, runtime))

    async def presets(
        self,
        ctx: Ctx,
        kind: Literal["devices", "clusters", "models", "jobs", "runtimes"] | None = None,
        name: Annotated[str | None, Field(description="one preset, whole")] = None,
    ) -> CallToolResult:
        """List presets of devices, clusters, models, jobs and runtimes, or show one with its sources."""
        return await self._run(ctx, "presets", [kind, name])

    async def schema(
        self,
        ctx: Ctx,
        document: Annotated[str | None, Field(description="mpctl.plan/2, ...; a job when absent")] = None,
        find: Annotated[str | None, Field(description="only settings of a job with these words: recompute")] = None,
    ) -> CallToolResult:
        """Find settings of a job by words, or show the JSON Schema of a job or of a document, which is long."""
        return await self._run(ctx, "schema", [document], _option("find", find))

    async def page(self, result: str, page: Annotated[int, Field(ge=1)]) -> CallToolResult:
        """Read another page of a long result, by the name that its first page has; kept until the server ends."""
        try:
            return _answer(self._pages.page(result, page))
        except InputError as error:
            return refusal(error)

    async def launch(
        self,
        ctx: Ctx,
        run_dir: Annotated[str, Field(description="a new directory for the run")],
        job: Job = None,
        settings: Settings = None,
    ) -> CallToolResult:
        """Train a job on this machine to its end, into a new directory."""
        return await self._run(ctx, "launch", [job], [*_option("run-dir", run_dir), *_job(job, settings)])


def _job(
    job: str | Mapping[str, Any] | None,
    settings: Mapping[str, Any] | None = None,
    model: str | None = None,
    gpus: str | None = None,
    runtime: str | None = None,
) -> list[str]:
    """The options of a job, the settings of its table among them, and --json."""
    table = dict(_items(job, "")) if isinstance(job, Mapping) else {}
    named = [*_option("model", model), *_option("gpus", gpus), *_option("runtime", runtime)]
    both = {**table, **(settings or {})}.items()
    return [*named, *(word for key, value in both for word in ("--set", f"{key}={_text(value)}")), "--json"]


def _option(name: str, value: object) -> list[str]:
    return [] if value is None else [f"--{name}={value}"]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _items(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """A job's tables as dotted keys."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _items(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _chosen(document: Any, keys: Sequence[str] | None) -> Any:
    """The document with the keys that were asked for, or all but the LONG ones. Raises InputError for unknown keys."""
    if not isinstance(document, dict) or "*" in (keys or ()):
        return document
    if wrong := [key for key in keys or () if key not in document]:
        known = ", ".join(document)
        raise InputError(Issue("no-key", "keys", f"the document has no {key!r}", f"its keys: {known}") for key in wrong)
    if keys:
        return {key: value for key, value in document.items() if key in keys or key == "schema"}
    return {key: value for key, value in document.items() if key not in LONG}


def _answer(result: dict[str, Any]) -> CallToolResult:
    has_failed = result.get("exit_code", 0) not in ANSWERED
    said = [TextContent(type="text", text=json.dumps(result))]
    return CallToolResult(content=said, structured_content=result, is_error=has_failed)
