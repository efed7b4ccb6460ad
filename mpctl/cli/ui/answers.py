"""Answers to the page. A control is a flag of the command line without its dashes, its value a word:

    {"model": "llama-3-70b", "gpus": "64xh100", "tp": "8", "sequence-parallel": "true"}

Every answer is made of what commands show: a plan's parts, the rules' words, a search's rows. Refused input comes
back as the issues of InputError, each with the control at fault.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Literal

from typing_extensions import TypedDict

from mpctl.cli.options import FLAGS, JobSource, command_line
from mpctl.core.errors import InputError, Issue, IssueEntry
from mpctl.core.sharding import divisors
from mpctl.plan.planning.plan import Plan, load_plan
from mpctl.plan.planning.summary import headline_figures, step_text
from mpctl.plan.planning.whole_run import WholeRun, plan_whole_run, read_tokens
from mpctl.plan.rules.validate import check_job
from mpctl.plan.search.request import SETTINGS as LAYOUT
from mpctl.spec.gpus import CLUSTERS, read_gpus
from mpctl.spec.load import UNSET, load_partial

SETTINGS = {flag.option.split("/")[0].removeprefix("--"): flag for flag in FLAGS}
BY_SETTING = {flag.setting: name for name, flag in SETTINGS.items()}
ADAPTERS = {"lora": "lora", "qlora": "qlora"}  # control -> training.adapter.kind; its value is the rank
RUN = "tokens"  # of the run whose days and price are shown
PLACED = {where: where for where in LAYOUT if where not in BY_SETTING}
"""Settings of a layout without a flag, `parallel.schedule`, are controls by their full name."""
NAMES = ["job", "gpus", RUN, *SETTINGS, *ADAPTERS, *PLACED]
"""All controls."""
OF_LAYOUT = {*(BY_SETTING.get(where, where) for where in LAYOUT), "pipeline-layout"}
"""Controls that a search chooses."""
CHOICES: Mapping[str, tuple[str, ...]] = {
    "zero": ("0", "1", "2", "3"),
    "recompute": ("none", "selective", "full"),
    "sequence-parallel": ("false", "true"),
}
SIZES = ("tp", "pp", "cp", "ep", "vpp", "micro-batch-size")
MOST_CHOICES = 12
LONGEST = 200  # characters of a control's value


class ControlIssue(TypedDict):
    """An issue and the control at fault; empty where no control stands for it."""

    control: str
    issue: IssueEntry


class PlanAnswer(TypedDict):
    """A plan. status: what to colour; html: its parts as a page has them; data: of its map of ranks; step: with its
    band, in words; run: days and price of the run of so many tokens, in words; figures: the main ones, by name."""

    status: Literal["fits", "over", "unknown", "illegal"]
    verdict: str
    command: str
    html: str
    data: dict[str, Any]
    step: str
    run: str
    figures: dict[str, str]
    issues: list[ControlIssue]


def controls_of(job: JobSource, tokens: str | None = None) -> dict[str, str]:
    """The controls of a command line's job. Raises InputError for settings that the page has no control for."""
    given = dict(job.overrides)
    words = {"job": job.source} if job.source else {}
    counts = given.get("cluster.nodes"), given.get("cluster.gpus_per_node")
    device = next((name for name, cluster in CLUSTERS.items() if cluster == given.get("cluster")), None)
    if device and isinstance(counts[0], int) and isinstance(counts[1], int):
        words["gpus"] = f"{counts[0] * counts[1]}x{device}"
        named = read_gpus(words["gpus"]).settings
        given = {where: value for where, value in given.items() if where not in named}
    kind = given.get("training.adapter.kind")
    if isinstance(kind, str) and kind in ADAPTERS:
        words[kind] = str(given.pop("training.adapter.rank", 16))
        del given["training.adapter.kind"]
    hint = "write them into a job file (mpctl emit JOB toml) and name that: mpctl ui FILE"
    if lost := [where for where in given if where not in BY_SETTING and where not in PLACED]:
        raise InputError([Issue("no-control", where, "has no control on the page", hint) for where in lost])
    words |= {_name(where): word_of(value) for where, value in given.items()}
    return words | ({RUN: tokens} if tokens else {})


def _name(where: str) -> str:
    """The control of a setting that has one."""
    return BY_SETTING.get(where, where)


def word_of(value: object) -> str:
    if value is None:
        return UNSET
    return str(value).lower() if isinstance(value, bool) else str(value)


def source_of(controls: Mapping[str, str]) -> JobSource:
    """The job that controls describe. Raises InputError with every wrong one."""
    issues, overrides = list[Issue](), dict[str, Any]()
    source = None
    for name, word in controls.items():
        if not word or name == RUN:
            continue
        if len(word) > LONGEST:
            issues += InputError.of("too-long", name, f"{len(word)} characters, at most {LONGEST} are read").issues
        elif name == "job":
            source = word
        elif name == "gpus":
            try:
                overrides |= read_gpus(word).settings
            except InputError as error:
                issues += error.issues
        elif name in ADAPTERS:
            overrides |= {"training.adapter.kind": ADAPTERS[name], "training.adapter.rank": _value(int, word)}
        elif name in SETTINGS:
            overrides[SETTINGS[name].setting] = _value(SETTINGS[name].type, word)
        elif name in PLACED:
            overrides[name] = None if word == UNSET else int(word) if word.isdecimal() else word
        else:
            issues += InputError.of("no-control", name, "is no control of the page", "leave it out").issues
    if issues:
        raise InputError(issues)
    return JobSource(source, overrides)


def _value(kind: type, word: str) -> object:
    """A word in a setting's type, or the word itself, which the job's schema then refuses by its name."""
    if word == UNSET:
        return None
    if kind is bool:
        return {"true": True, "false": False}.get(word, word)
    try:
        return kind(word)
    except ValueError:
        return word


def plan_answer(controls: Mapping[str, str]) -> PlanAnswer:
    """The plan of a layout, drawn, or why there is none."""
    from mpctl.render.page import fragment
    from mpctl.render.plan import PlanView, plan_parts, verdict
    from mpctl.render.plan_map import layout_data

    try:
        job = source_of(controls)
        plan = load_plan(job.source, job.overrides)
        topology = plan.require_legal()
        run = run_of(controls, plan)
        html = fragment(plan_parts(plan, topology, PlanView(run=run, is_page=True)))
    except InputError as error:
        found = [ControlIssue(control=_control(issue.where), issue=issue.as_dict()) for issue in error.issues]
        words = error.issues[0].message if error.issues else str(error)
        return PlanAnswer(
            status="illegal", verdict=words, command="", html="", data={}, step="", run="", figures={}, issues=found
        )
    status: Literal["fits", "over", "unknown"] = "unknown" if plan.fits is None else "fits" if plan.fits else "over"
    return PlanAnswer(
        status=status,
        verdict=verdict(plan),
        command=command_of(job, controls),
        html=str(html),
        data=layout_data(plan, topology),
        step=_step_words(plan),
        run=run_words(run),
        figures=dict(headline_figures(plan)),
        issues=[],
    )


def run_of(controls: Mapping[str, str], plan: Plan) -> WholeRun | None:
    """The run of the tokens that the page names; None where it names none. Raises InputError."""
    tokens = controls.get(RUN)
    return plan_whole_run(plan, read_tokens(tokens)) if tokens else None


def run_words(run: WholeRun | None) -> str:
    """Days, GPU-hours, price and energy as a search says them; empty without a run."""
    from mpctl.render.search import whole_run_text

    return whole_run_text(asdict(run)) if run else ""


def _step_words(plan: Plan) -> str:
    """The step with its band; empty without an estimate."""
    if plan.estimate is None or isinstance(plan.estimate.time, str):
        return ""
    return step_text(plan.estimate.time)


def command_of(job: JobSource, controls: Mapping[str, str], verb: str = "plan") -> str:
    """The command line of the same plan; GPUs and tokens as they were named."""
    gpus, tokens, rest = controls.get("gpus"), controls.get(RUN), job.overrides
    if gpus:
        named = read_gpus(gpus).settings
        rest = {key: value for key, value in rest.items() if key not in named}
    more = [word for option, value in (("--gpus", gpus), ("--tokens", tokens)) if value for word in (option, value)]
    return " ".join([command_line(verb, job.source, rest), *([shlex.join(more)] if more else [])])


def _control(where: str) -> str:
    """The control that a place of the job has, such as `parallel.tp`; empty without one."""
    flat = where.split(":")[0].strip()
    found = BY_SETTING.get(flat, flat.removeprefix("--"))
    return found if found in NAMES else ""


def choices(
    controls: Mapping[str, str], is_stale: Callable[[], bool] = lambda: False, only: str = ""
) -> dict[str, dict[str, str]]:
    """By control its values near the layout, each with the rule's words that refuse it, or empty.
    is_stale: whether a newer question waits, for which the rest is left out; only: this control, or all."""
    found: dict[str, dict[str, str]] = {}
    for name, values in _values(controls):
        for value in values if only in ("", name) else ():
            if is_stale():
                return found
            found.setdefault(name, {})[value] = _refusal({**controls, name: value})
    return found


def _values(controls: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    try:
        job = source_of({name: word for name, word in controls.items() if name not in SIZES})
    except InputError:
        return
    loaded = load_partial(job.source, job.overrides).job
    world = loaded.world_size if loaded is not None else 1
    sizes = [size for size in divisors(world) if size & (size - 1) == 0 or size <= 64]
    for name in SIZES:
        wanted = range(1, 9) if name == "vpp" else (1, 2, 4, 8, 16) if name == "micro-batch-size" else sizes
        yield name, [str(size) for size in list(wanted)[:MOST_CHOICES]]
    for name, words in CHOICES.items():
        yield name, list(words)


def _refusal(controls: Mapping[str, str]) -> str:
    """The first rule that refuses the layout, without its estimates and without hints, which try other layouts."""
    try:
        job = source_of(controls)
    except InputError as error:
        issues = list(error.issues)
    else:
        loaded = load_partial(job.source, job.overrides)
        checks = check_job(loaded.job, loaded.tables_with_errors) if loaded.job else []
        issues = [*loaded.issues, *(check.issue for check in checks if check.status == "error")]
    return f"{issues[0].where}: {issues[0].message}" if issues else ""


def emit_answer(controls: Mapping[str, str], target: str) -> dict[str, str]:
    """The plan as flags or config of another launcher, or as a job file."""
    from mpctl.cli.job_toml import job_toml
    from mpctl.interop.emitted import emit_plan

    job = source_of(controls)
    if target == "toml":
        return {"text": job_toml(job.source, job.overrides, [command_of(job, controls)])}
    return {"text": emit_plan(load_plan(job.source, job.overrides), target).text}
