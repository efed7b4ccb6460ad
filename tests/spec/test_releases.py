"""Runtime presets by the release that a user has."""

import pytest

from mpctl.core.errors import InputError
from mpctl.spec.issues import release_hint
from mpctl.spec.load import load_job, load_partial
from mpctl.spec.presets import bundled_names
from mpctl.spec.releases import find_release, preset_named, releases, releases_of

BLACKWELL, HOPPER = {"bf16", "nvfp4"}, {"bf16", "fp8"}


@pytest.mark.parametrize(
    ("text", "blackwell", "hopper"),
    [
        ("megatron-bridge-26.06", "megatron-core-graphs", "megatron-core"),
        ("megatron-bridge-26.04.01", "megatron-core", "megatron-core"),
        ("Megatron_Bridge_v0.5.1", "megatron-core-graphs", "megatron-core"),
        ("megatron-bridge==0.4.0", "megatron-core", "megatron-core"),
        ("nvcr.io/nvidia/nemo:26.08", "megatron-core-graphs", "megatron-core"),
        ("nemo:25.11.nemotron_3_nano", "megatron-core", "megatron-core"),
        ("megatron-core-0.16.1", "megatron-core", "megatron-core"),
        ("core_v0.16", "core_v0.16", "core_v0.16"),
        ("megatron-lm-core_v0.18.0", "megatron-core-graphs", "megatron-core"),
        ("torchtitan-0.2.0", "torchtitan", "torchtitan"),
        ("trl-1.16", "trl", "trl"),
        ("unsloth-2026.10.3", "unsloth", "unsloth"),
        ("megatron-core", "megatron-core", "megatron-core"),
        ("./ours.toml", "./ours.toml", "./ours.toml"),
    ],
)
def test_a_release_has_the_preset_that_was_fitted_to_it(text: str, blackwell: str, hopper: str) -> None:
    assert (preset_named(text, BLACKWELL), preset_named(text, HOPPER)) == (blackwell, hopper)


def test_every_preset_of_the_table_is_there_and_the_last_is_for_every_device() -> None:
    for software in releases():
        for presets in software.first.values():
            assert {*presets} <= bundled_names("runtimes")
            assert preset_named(f"{software.names[0]}-{software.latest}", HOPPER) in software.presets_of(
                software.latest
            )
    assert "megatron-bridge from 26.06 with nvfp4" in releases_of("megatron-core-graphs")


def test_a_newer_release_is_planned_as_the_newest_and_says_so() -> None:
    found = find_release("megatron-bridge-27.02")
    assert found is not None and found.note == "newer than the newest known, 26.08, and planned as that"
    patch = find_release("megatron-bridge-26.08.02")
    assert patch is not None and not patch.note
    bare = find_release("nemo")
    assert bare is not None and bare.note == "no release is given: the newest, 26.08"


def test_a_job_that_names_a_release_names_its_preset_once_it_is_loaded() -> None:
    settings = {"cluster": "dgx-gb200", "model": "gpt2", "training.runtime": "megatron-bridge-26.06"}
    loaded = load_partial(None, settings)
    assert loaded.job is not None and loaded.job.training.runtime == "megatron-core-graphs"
    assert not loaded.job.training.is_runtime_default
    [warning] = loaded.warnings
    assert warning.rule == "runtime-release"
    assert warning.message == "megatron-bridge-26.06 is planned by the figures of runtime megatron-core-graphs"
    assert warning.hint == "--runtime megatron-core for those of Megatron-Core"
    assert load_job(None, {**settings, "cluster": "dgx-h100"}).training.runtime == "megatron-core"
    assert not load_partial(None, {**settings, "training.runtime": "megatron-core"}).warnings


def test_a_release_that_no_preset_was_fitted_to_is_refused_with_those_known() -> None:
    with pytest.raises(InputError) as refused:
        load_job(None, {"cluster": "dgx-h100", "model": "gpt2", "training.runtime": "megatron-bridge-23.01"})
    [issue] = refused.value.issues
    assert issue.rule == "unknown-release"
    assert issue.hint == "known: megatron-bridge-24.05 to 26.08, megatron-bridge-0.1 to 0.6"
    assert release_hint("megatron-brige-26.06") == "megatron-bridge-26.06"
    with pytest.raises(InputError, match="megatron-brige") as refused:
        load_job(None, {"model": "gpt2", "training.runtime": "megatron-brige-26.06"})
    assert refused.value.issues[0].hint == "use megatron-bridge-26.06"
