"""A model so small that a run of it takes seconds, and cases and records made by hand."""

from functools import partial

from mpctl.measure.bench.cases import TIMED_SETTINGS, PlannedCase, RunCase
from mpctl.plan.planning.plan import load_plan
from mpctl.records.rundir.directory import RunDir
from mpctl.run.launch.launch_plan import LaunchPlan

SHAPE = {
    "layers": 1,
    "hidden": 32,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn": 64,
    "vocab": 512,
    "seq_length": 32,
    "max_positions": 32,
}


def write_texts(folder):
    """The folder, with 24 texts of 400 words each."""
    for number in range(24):
        words = " ".join(f"word{(number * 7 + k) % 101}" for k in range(400))
        (folder / f"{number}.txt").write_text(words)
    return folder


def small_settings(texts):
    """Settings that make the job `demo` a model of one narrow layer, trained on these texts."""
    return {**{f"model.{key}": value for key, value in SHAPE.items()}, "data.corpus": [str(texts)]}


def small_case(name, texts, **settings):
    """A case of the small model on one rank, or as the settings say, in 3 steps."""
    one = {"parallel.tp": 1, "cluster.gpus_per_node": 1, "training.steps": 3}
    own = {**small_settings(texts), **one, **TIMED_SETTINGS, **settings}
    return RunCase(name, partial(load_plan, "demo", own))


def planned_case(name="case", *, tokens=256, predicted=None, **settings):
    """A case of the job `demo`, by default on one rank, planned and not run. tokens: of a step, as
    one sequence; predicted: seconds of a step."""
    batch = {"training.global_batch_size": 1, "training.micro_batch_size": 1}
    shape = {"model.seq_length": tokens, "model.max_positions": tokens}
    one = {"parallel.tp": 1, "cluster.gpus_per_node": 1}
    plan = load_plan("demo", {**batch, **shape, **one, **settings})
    launch = plan.job.launch.model_copy(update={"predicted_step_seconds": predicted})
    job = plan.job.model_copy(update={"launch": launch})
    started = LaunchPlan(job, RunDir(name), job.world_size, {}, {})
    return PlannedCase(name, name, plan, started)


def step_records(seconds):
    """A record for each step; half of its time is processor time."""
    return [{"step": n, "tokens": 100 * n, "step_seconds": s, "cpu_seconds": s / 2} for n, s in enumerate(seconds, 1)]
