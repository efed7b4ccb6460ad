"""nanotron's config file: its keys against the recorded classes, its sizes and batch."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from mpctl.core.errors import InputError
from mpctl.interop.emitted import emit_plan
from mpctl.interop.nanotron import read_nanotron
from mpctl.plan.planning.plan import Plan, load_plan
from tests.interop.jobs import EXAMPLE, LATENT, MIXTURE, Settings, plan_of
from tests.interop.snippets import fields_of
from tests.interop.test_megatron import refusals
from tests.interop.test_torchtitan import SHAPE

# Keys of main that PyPI's 0.4 does not have (src/nanotron/config/ of 2026-04).
LATER = {"context_parallel_size", "recompute_layer", "optimizer_factory", "rope_theta"}
LAYOUTS: dict[str, Settings] = {
    "replicas": {},
    "all": {"parallel.tp": 2, "parallel.cp": 2, "parallel.pp": 2, "parallel.zero": 1},
    "sequence": {"parallel.tp": 4, "parallel.sequence_parallel": True},
    "gpipe": {"parallel.pp": 4, "parallel.schedule": "gpipe"},
    "recompute": {"training.recompute": "full", "training.lr_schedule": "linear"},
}


def config_of(plan: Plan) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(emit_plan(plan, "nanotron").text)
    return config


@pytest.mark.parametrize("name", LAYOUTS)
def test_keys_sizes_and_batch(name: str) -> None:
    plan = plan_of({**SHAPE, **LAYOUTS[name]})
    job, config = plan.job, config_of(plan)
    assert set(config) <= fields_of("nanotron", "Config")
    for part, kind in (
        (config["general"], "GeneralArgs"),
        (config["parallelism"], "ParallelismArgs"),
        (config["tokens"], "TokensArgs"),
        (config["model"], "ModelArgs"),
        (config["optimizer"], "OptimizerArgs"),
        (config["model"]["model_config"], "LlamaConfig"),
        (config["optimizer"]["learning_rate_scheduler"], "LRSchedulerArgs"),
    ):
        assert set(part) - LATER <= fields_of("nanotron", kind)
    sizes, tokens = config["parallelism"], config["tokens"]
    assert sizes["dp"] * sizes["pp"] * sizes["tp"] * sizes["context_parallel_size"] == 16
    assert job.training.global_batch_size == (
        tokens["micro_batch_size"] * tokens["batch_accumulation_per_replica"] * sizes["dp"]
    )
    assert (sizes["tp_mode"] == "REDUCE_SCATTER") == (name == "sequence")
    assert sizes["pp_engine"] == ("afab" if name == "gpipe" else "1f1b")
    numbers = config["optimizer"]["learning_rate_scheduler"]
    assert isinstance(numbers["min_decay_lr"], float)


@pytest.mark.parametrize(
    ("engine", "schedule"), [("", "gpipe"), ("pp_engine: null", "gpipe"), ("pp_engine: 1f1b", "1f1b")]
)
def test_a_pipeline_without_an_engine_is_afab(engine: str, schedule: str) -> None:
    """ParallelismArgs.__post_init__ of src/nanotron/config/parallelism_config.py."""
    text = f"parallelism: {{dp: 1, tp: 2, pp: 4, {engine}}}\ntokens: {{micro_batch_size: 1}}"
    assert read_nanotron(text).settings["parallel.schedule"] == schedule


def test_the_example_without_chunks() -> None:
    plan = plan_of({"parallel.vpp": 1, "training.recompute": "none"}, base=EXAMPLE)
    config = config_of(plan)
    assert config["tokens"]["batch_accumulation_per_replica"] == 64
    notes = emit_plan(plan, "nanotron").notes
    assert any("padded to 128256, a multiple of 1 x tp 4" in note for note in notes)


@pytest.mark.parametrize(
    ("settings", "rules"),
    [
        ({"parallel.pp": 4, "parallel.vpp": 3}, {"emit-vpp"}),
        ({"parallel.zero": 2}, {"emit-zero"}),
        ({"parallel.zero": 1, "parallel.zero_size": 8}, {"emit-zero-size"}),
        ({"training.recompute": "selective"}, {"emit-recompute"}),
        ({"training.lr_schedule": "constant"}, {"emit-lr-schedule"}),
        ({"model.activation": "gelu"}, {"emit-activation"}),
        ({"model.head_dim": 16}, {"emit-head-dim"}),
        ({**MIXTURE, "parallel.ep": 2}, {"emit-ep", "emit-experts"}),
        (LATENT, {"emit-attention-kind"}),
    ],
)
def test_what_it_cannot_say(settings: Settings, rules: set[str]) -> None:
    assert set(refusals({**SHAPE, **settings}, "nanotron")) == rules


def test_without_a_model_there_is_no_sequence_length() -> None:
    """None is invented."""
    plan = load_plan(None, {"cluster.nodes": 1, "cluster.gpus_per_node": 2})
    with pytest.raises(InputError) as caught:
        emit_plan(plan, "nanotron")
    assert [issue.rule for issue in caught.value.issues] == ["emit-model"]
