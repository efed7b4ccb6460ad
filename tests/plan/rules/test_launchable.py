"""What the plan calls legal builds and trains: odd shapes, rehearsed on fake tensors.

Nothing that the rules accept may end with an error in the kernels, and what a rank holds and sends
is what the plan says. `make test` draws a few jobs, always the same; `make test-all` hundreds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as drawn
from hypothesis import strategies as st

from mpctl.model.layout.topology import job_topology
from mpctl.plan.planning.plan import make_plan
from mpctl.records.rundir.summary import STATES
from mpctl.run.hosts.machine import Machine
from mpctl.run.launch.rehearse import check_rehearsal
from mpctl.run.launch.summary import planned_traffic
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from mpctl.train.rehearsal.worker import rehearse_rank

SIZES: dict[str, list[int]] = {"tp": [1, 1, 2, 3, 4], "cp": [1, 1, 1, 2], "dp": [1, 2, 3], "pp": [1, 1, 1, 2]}
POSITIONS = {"bert": "learned", "t5": "relative", "glm": "learned"}


def variants(of: Callable[..., Any]) -> dict[str, Any]:
    """Keys by which decoders differ, legal together or not."""
    window = of(None, None, 3, 5)
    return {
        "model.position": of("alibi", "rotary", "learned"),
        "model.attention_window": window,
        "model.attention_window_every": window and of(None, 2),
        "model.qk_norm": of(True, False),
        "model.embedding_norm": of(True, False),
        "model.norm": of("layernorm", "rmsnorm", "nonparametric"),
        "model.norm_order": of("pre", "pre", "output", "sandwich"),
        "model.parallel_residual": (parallel := of(True, False)),
        "model.shared_norm": parallel and of(True, False),
        "model.bias": of(True, False, "qkv", "mlp"),
        "model.activation": of("relu2", "swiglu"),
        "model.rotary_fraction": of(1.0, 0.5),
    }


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Dotted settings of small jobs, legal or not."""

    def of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    family = of("gpt", "gpt", "bert", "t5", "glm")
    sizes = {axis: of(*values) for axis, values in SIZES.items()}
    heads, batch = of(1, 2, 3, 4, 6, 12), of(1, 2, 3)
    job = {
        "model.family": family,
        "model.layers": of(1, 2, 3, 4),
        "model.heads": heads,
        "model.hidden": of(6, 8, 12, 24, 36),
        "model.head_dim": of(None, None, 1, 2, 6, 7, 8, 9),
        "model.kv_heads": heads if family == "t5" else of(1, 2, heads, heads),
        "model.ffn": of(12, 24, 30),
        "model.vocab": of(110, 130, 300),
        "model.vocab_divisor": of(1, 2, 128),
        "model.seq_length": of(7, 8, 12, 24),
        "model.activation": of("gelu", "relu", "swiglu"),
        "model.norm": of("layernorm", "rmsnorm"),
        "model.bias": of(True, False),
        "model.tied_embeddings": of(True, False),
        "model.position": POSITIONS.get(family) or of("learned", "rotary", "rotary", "none"),
        **{f"parallel.{axis}": size for axis, size in sizes.items()},
        "cluster.gpus_per_node": sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"],
        "parallel.sequence_parallel": sizes["tp"] > 1 and of(True, False),
        "parallel.zero": of(0, 0, 1, 2, 3) if sizes["dp"] * sizes["cp"] > 1 else 0,
        "parallel.bucket_bytes": of(1, 2000, 25 * 2**20),
        "parallel.stage_balance": "cost",
        "training.micro_batch_size": batch,
        "training.global_batch_size": 2 * batch * sizes["dp"],
        "training.recompute": of("none", "selective", "full"),
        "training.dropout": of(0.0, 0.1),
        "training.attention_dropout": of(0.0, 0.1),
        "training.dtype": of("fp32", "fp64", "bf16"),
        "launch.device": of("cpu", "cuda"),
    }
    if sizes["pp"] > 1:
        job["parallel.schedule"] = of("1f1b", "gpipe", "zero-bubble")
    if job["training.recompute"] == "full":
        job["training.partition_activations"] = of(False, not job["parallel.sequence_parallel"])
        job["training.offload_activations"] = of(False, True)
    if family == "t5":
        job |= {
            "model.decoder_layers": of(1, 2),
            "model.decoder_seq_length": of(8, 12, 24),
            "model.relative_buckets": of(2, 4, 5, 8),
            "model.relative_max_distance": of(4, 9),
        }
    if family == "gpt" and of(True, False):
        job |= variants(of)
    if job["model.position"] == "rotary" and of(True, False):
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position")
        job["model.rotary_scaling"] = {key: float(of(1, 4, 16)) for key in keys}
    return job


GRIDS = [("2d", 4), ("2.5d", 4), ("2.5d", 8), ("3d", 8)]


@st.composite
def grid_jobs(draw: st.DrawFn) -> dict[str, Any]:
    """The same in a tensor mode other than 1d, most of them legal."""

    def of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    mode, tp = of(*GRIDS)
    job = draw(jobs().filter(lambda job: job["model.family"] == "gpt"))
    dp, pp, batch = job["parallel.dp"], of(1, 1, 2), 2 * of(1, 2, 2, 3)
    kv, heads = of(2, 2, 4), of(4, 8, 12)
    return {
        **job,
        "parallel.tensor_mode": mode,
        "parallel.tp": tp,
        "parallel.cp": 1,
        "parallel.pp": pp,
        "parallel.sequence_parallel": False,
        "parallel.zero": job["parallel.zero"] if dp > 1 else 0,
        "parallel.schedule": of("1f1b", "gpipe"),
        "cluster.gpus_per_node": tp * dp * pp,
        "model.heads": heads,
        "model.kv_heads": kv,
        "model.hidden": of(8, 12, 24),
        "model.head_dim": of(2, 4, 6, 9),
        "model.ffn": of(12, 24, 30),
        "training.micro_batch_size": batch,
        "training.global_batch_size": 2 * batch * dp,
        "training.partition_activations": False,
    }


def is_refused(job: JobSpec) -> bool:
    plan = make_plan(job)
    return bool(plan.errors) or bool(check_rehearsal(plan, Machine(2, 0, 2**40)))


def check(settings: dict[str, Any]) -> None:
    job = load_job(None, {k: v for k, v in settings.items() if v is not None})
    if is_refused(job):
        return
    estimate = make_plan(job).estimate
    assert estimate is not None
    topology = job_topology(job)
    account = rehearse_rank(job, topology, topology.world_size - 1)
    assert account["failure"] is None, "".join(account["failure"]["traceback"])
    memory = estimate.memory[-1]
    assert account["parameters"] == memory.parameters
    assert account["state_bytes"] == {k: getattr(memory, name) for k, name in STATES.items()}
    assert account["step_traffic"] == planned_traffic(estimate.messages[-1])


# Not shrunk: each further try is another rehearsal.
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": (Phase.explicit, Phase.generate)}


@drawn(max_examples=8, derandomize=True, **QUIET)
@given(jobs())
def test_what_is_legal_runs(settings: dict[str, Any]) -> None:
    check(settings)


@drawn(max_examples=4, derandomize=True, **QUIET)
@given(grid_jobs())
def test_what_is_legal_runs_in_every_tensor_mode(settings: dict[str, Any]) -> None:
    check(settings)


@pytest.mark.timeout(1800)
@pytest.mark.slow
@drawn(max_examples=150, **QUIET)
@given(grid_jobs())
def test_what_is_legal_runs_in_every_tensor_mode_of_many(settings: dict[str, Any]) -> None:
    check(settings)


@pytest.mark.timeout(1800)
@pytest.mark.slow
@drawn(max_examples=200, **QUIET)
@given(jobs())
def test_what_is_legal_runs_of_many(settings: dict[str, Any]) -> None:
    check(settings)
