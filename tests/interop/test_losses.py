"""The way to compute a loss in launchers' words, written and read again; what a launcher has no word for is refused."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.interop.emitted import emit_plan, get_launcher
from tests.interop.jobs import LLAMA, Settings, plan_of

CHUNKS = "training.cross_entropy_chunks"
WRITTEN: list[tuple[str, Settings, str]] = [
    ("megatron", {"training.cross_entropy": "fused"}, "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native"),
    ("megatron-bridge", {"training.cross_entropy": "te"}, 'cfg.model.cross_entropy_fusion_impl = "te"'),
    ("megatron-bridge", {"training.cross_entropy": "linear"}, 'cfg.model.cross_entropy_fusion_impl = "linear"'),
    ("megatron-bridge", {"training.cross_entropy": "unfused"}, "cfg.model.cross_entropy_loss_fusion = False"),
    ("torchtitan", {"training.cross_entropy": "linear", CHUNKS: 16}, "config.loss.num_chunks = 16"),
    ("torchtitan", {"training.cross_entropy": "unfused"}, "config.loss = config.loss.loss_fn"),
    ("trl", {"training.cross_entropy": "linear"}, "loss_type: nll"),
    (
        "trl",
        {"training.cross_entropy": "linear", "training.recompute": "full", "training.offload_activations": True},
        "gradient_checkpointing_kwargs:\n  offload: true",
    ),
    ("trl", {"training.cross_entropy": "fused"}, "fused_linear_cross_entropy: false"),
    ("axolotl", {}, "liger_fused_linear_cross_entropy: true"),
    ("axolotl", {"training.cross_entropy": "fused"}, "liger_cross_entropy: true"),
    ("axolotl", {"training.cross_entropy": "unfused", "training.tiled_mlp": 4}, "tiled_mlp_num_shards: 4"),
    ("llama-factory", {"training.cross_entropy": "linear"}, "enable_liger_kernel: true"),
]
WORDS: dict[str, Settings] = {
    launcher: {**LLAMA, "training.dtype": "bf16", "training.runtime": runtime}
    for launcher, runtime in {
        "megatron": "megatron-core-graphs",
        "megatron-bridge": "megatron-core-graphs",
        "torchtitan": "torchtitan",
        "trl": "trl",
        "axolotl": "trl",
        "llama-factory": "trl",
        "accelerate": "fsdp2",
        "nanotron": "nanotron",
    }.items()
}


@pytest.mark.parametrize(("launcher", "settings", "words"), WRITTEN)
def test_a_loss_is_written_and_read(launcher: str, settings: Settings, words: str) -> None:
    plan = plan_of({**WORDS[launcher], **settings})
    text = emit_plan(plan, launcher).text
    assert words in " ".join(text.replace("\\\n", " ").split(" ")).replace("    ", ""), text
    read = get_launcher(launcher).read
    assert read is not None
    if launcher == "trl":  # its file, which the text writes beside that of accelerate
        text = text.split("cat > sft.yaml <<'EOF'\n")[1].split("\nEOF")[0]
    found: dict[str, Any] = dict(read(text, {"model": "llama-3-8b"}).settings)
    for key, value in ({"training.cross_entropy": "linear"} | settings).items():
        if key != CHUNKS or launcher == "torchtitan":
            assert found[key] == value, (key, found)


@pytest.mark.parametrize(
    ("launcher", "settings", "where"),
    [
        ("megatron", {"training.cross_entropy": "linear", CHUNKS: 4}, CHUNKS),
        ("megatron", {"training.cross_entropy": "te"}, "training.cross_entropy"),  # arguments.py ends on it
        ("torchtitan", {"training.cross_entropy": "fused"}, "training.cross_entropy"),
        ("torchtitan", {"model.seq_length": 4092}, "model.seq_length"),
        ("trl", {"training.cross_entropy": "unfused"}, "training.cross_entropy"),
        ("accelerate", {"training.cross_entropy": "linear"}, "training.cross_entropy"),
        ("nanotron", {"training.tiled_mlp": 4}, "training.tiled_mlp"),
    ],
)
def test_a_loss_without_words_is_refused(launcher: str, settings: Settings, where: str) -> None:
    with pytest.raises(InputError) as error:
        emit_plan(plan_of({**WORDS[launcher], **settings}), launcher)
    assert where in [issue.where for issue in error.value.issues]


def test_what_says_nothing_alone_is_told() -> None:
    read = get_launcher("megatron").read
    assert read is not None
    line = "--num-layers 4 --vocab-size 100 --cross-entropy-fusion-impl te"
    found = read(line, {})
    assert found.settings["training.cross_entropy"] == "unfused"
    assert any("--cross-entropy-fusion-impl" in warning.where for warning in found.warnings)
    with pytest.raises(InputError, match="'jit' is not known"):
        read("--num-layers 4 --vocab-size 100 --cross-entropy-loss-fusion --cross-entropy-fusion-impl jit", {})


@pytest.mark.parametrize(
    ("runtime", "way", "flags", "assigned"),
    [
        ("megatron-core", None, "--cross-entropy-fusion-impl native", "cross_entropy_loss_fusion = True"),
        ("megatron-core", "unfused", None, "cross_entropy_loss_fusion = False"),
        ("megatron-2021", None, None, "cross_entropy_loss_fusion = False"),
        ("torchtitan", None, None, None),  # linear, which only Megatron's branch dev has
    ],
)
def test_a_loss_that_a_plan_counts_on_is_written(
    runtime: str, way: str | None, flags: str | None, assigned: str | None
) -> None:
    """Without --cross-entropy-loss-fusion Megatron-LM fuses nothing, and a recipe of Bridge has its own."""
    plan = plan_of({**LLAMA, "training.runtime": runtime, "training.cross_entropy": way})
    for launcher, words in (("megatron", flags), ("megatron-bridge", assigned)):
        text = emit_plan(plan, launcher).body
        assert words in text if words else "cross" not in text, text


@pytest.mark.parametrize(
    ("flags", "runtime", "way"),
    [
        ("", None, "unfused"),
        ("", "amd-megatron", "unfused"),
        ("", "mpctl", None),
        ("--cross-entropy-loss-fusion", None, "fused"),
        ("--cross-entropy-loss-fusion", "mpctl", "fused"),
    ],
)
def test_without_a_flag_megatron_fuses_nothing(flags: str, runtime: str | None, way: str | None) -> None:
    read = get_launcher("megatron").read
    assert read is not None
    typed = {"training.runtime": runtime} if runtime else {}
    found = read(f"--num-layers 4 --vocab-size 100 {flags}", typed)
    assert found.settings.get("training.cross_entropy") == way


def test_a_recipe_of_bridge_without_the_field_keeps_its_own() -> None:
    read = get_launcher("megatron-bridge").read
    assert read is not None
    assert "training.cross_entropy" not in read("cfg.model.num_layers = 4", {}).settings
