"""The presets of a measured machine: valid TOML with comments, planned on by path and by name."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.core.errors import InputError
from mpctl.measure.bench.machine_fit import DeviceFit, LinkFit
from mpctl.measure.bench.machine_preset import MachinePreset, check_name, machine_preset, preset_text
from mpctl.measure.bench.report import BenchEnvironment
from mpctl.measure.calibrate.own_fit import FreeFigure, OwnFit
from mpctl.measure.calibrate.posterior import Posterior
from mpctl.measure.calibrate.runs import Constant, Kind
from mpctl.plan.estimate.system import find_system
from mpctl.plan.planning.plan import load_plan
from mpctl.spec.cluster import DeviceSpec, InnerLinkSpec
from mpctl.spec.load import load_job
from mpctl.spec.runtime import get_profile

# TOML has no surrogates and, unlike JSON, does not allow DEL as it is.
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"))


def test_values_come_before_tables_with_comments_next_to_them() -> None:
    table = {"peak": {"fp32": 1.853e11}, "name": "a", "inner": {"link": {"count": 2}, "on": True}}
    text = preset_text(table, head=["one", "two"], comments={"peak.fp32": "best", "name": "here"})
    assert text.startswith('# one\n# two\nname = "a"  # here\n\n[peak]\nfp32 = 1.853e+11  # best\n')
    assert tomllib.loads(text) == table


@given(TEXTS, st.floats(1e-9, 1e18), st.integers(0, 2**60))
def test_what_was_written_is_read(text: str, value: float, count: int) -> None:
    table = {"text": text, "inner": {"value": value, "count": count}}
    found = tomllib.loads(preset_text(table, head=[], comments={}))
    assert (found["text"], found["inner"]["count"]) == (text, count)
    assert found["inner"]["value"] == pytest.approx(value, rel=1e-3)


ENVIRONMENT: BenchEnvironment = {
    "date": "2026-11-22T15:00:00+00:00",
    "host": "box",
    "machine": "A CPU",
    "cores": 2,
    "gpus": 0,
    "load_at_start": 0.1,
    "python": "3.12.1",
    "torch": "2.13.0",
    "mpctl": "0.9",
}
DEVICE = DeviceSpec.model_validate(
    {
        "name": "a core",
        "kind": "cpu",
        "memory_bytes": 2**33,
        "memory_bandwidth": 12.34e9,
        "peak_flops": {"fp32": 181.7e9},
        "kernels": {
            "products": 0.98,
            "depth": 101.0,
            "memory": 0.9,
            "flash": 0.3,
            "flash_backward": 0.35,
            "host": 1.2,
            "source": "here",
        },
        "source": "here",
    }
)
LINK = InnerLinkSpec(name="shared memory", bandwidth=5e9, efficiency=0.8, latency=2e-5)


def preset(link: InnerLinkSpec | None = LINK) -> MachinePreset:
    device = DeviceFit(DEVICE, {"memory_bandwidth": "triad"})
    fit = None if link is None else LinkFit(link, 0.1, {"latency": "a step"})
    return machine_preset("mine", device, fit, ENVIRONMENT, per_node=2)


FITTED: tuple[tuple[Kind, str, float], ...] = (
    ("devices", "kernels.host", 1.5),
    ("clusters", "intra_node.latency", 3e-5),
    ("devices", "kernels.products", 0.98),
)
FIT = OwnFit(
    runs=[],
    figures=[FreeFigure(Constant(kind, "mine", path, 0.5), value, 0.0, 0.0, 9.0) for kind, path, value in FITTED],
    posterior=Posterior([0.0] * len(FITTED), [], [], [], [], 0.05),
    slopes=[],
    owners=[],
    before={},
    fitted={},
    left_out={"a": [0.1], "b": [0.1], "c": [0.1]},
    spreads={"mpctl": 0.061},
)


def test_what_was_measured_is_read_from_the_files(tmp_path: Path) -> None:
    written = preset().write(tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in written} == {"devices/mine.toml", "clusters/mine.toml"}
    cluster = load_job(None, {"cluster": str(tmp_path / "clusters" / "mine.toml")}).cluster
    assert (cluster.gpus_per_node, cluster.cores, cluster.nodes) == (2, 2, 1)
    assert cluster.device == DEVICE.model_copy(update={"kernels": cluster.device and cluster.device.kernels})
    assert cluster.device.kernels == DEVICE.kernels
    assert cluster.intra_node == LINK
    assert cluster.name == "mine: 2 cores of A CPU"


def test_it_is_planned_on_by_name_where_the_folder_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset().with_fit(FIT).write(tmp_path)
    monkeypatch.setenv("MPCTL_PRESETS", str(tmp_path))
    plan = load_plan("demo", {"cluster": "mine", "parallel.tp": 2})
    assert plan.estimate is not None and not isinstance(plan.estimate.time, str)
    assert plan.estimate.time.extrapolates == ()


def test_files_say_where_when_and_how() -> None:
    text = preset().texts()
    assert text["devices/mine.toml"].startswith(
        "# Measured by `mpctl bench machine` on 2026-11-22T15:00:00+00:00, host box:\n"
        "# A CPU, 2 cores, 0 GPUs, load average 0.10;\n# Python 3.12.1, torch 2.13.0, mpctl 0.9."
    )
    assert "memory_bandwidth = 1.234e+10  # triad\n" in text["devices/mine.toml"]
    assert "latency = 2e-05  # a step\n" in text["clusters/mine.toml"]


def test_runs_move_figures_and_it_is_said_which() -> None:
    fitted = preset().with_fit(FIT)
    assert fitted.device.kernels is not None and fitted.cluster.intra_node is not None
    assert (fitted.device.kernels.host, fitted.cluster.intra_node.latency) == (1.5, 3e-5)
    assert fitted.cluster.spread == 0.061
    text = fitted.texts()
    assert "host = 1.5  # moved by training runs from 1.2\n" in text["devices/mine.toml"]
    assert "a step; moved by training runs from 2e-05" in text["clusters/mine.toml"]
    assert "spread = 0.061  # 3 layouts, each left out\n" in text["clusters/mine.toml"]
    assert "products = 0.98\n" in text["devices/mine.toml"]  # not moved


def test_nothing_is_added_to_a_machine_that_was_measured() -> None:
    """Before any run gave it a spread: a runtime's shift of unknown systems is for others."""
    cluster = preset().cluster
    assert cluster.spread is None and cluster.step_factor == 1.0
    assert find_system(cluster, get_profile("mpctl")).factor == 1.0


def test_a_single_device_has_no_link(tmp_path: Path) -> None:
    preset(None).write(tmp_path)
    assert load_job(None, {"cluster": str(tmp_path / "clusters/mine.toml")}).cluster == (preset(None).cluster)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a.toml", "-x", "a b", "x" * 64])
def test_a_name_that_no_file_may_have_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="is no name of a preset"):
        check_name(name)


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "devices").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        preset().write(tmp_path)
