"""Numbers with units in files and settings: the same plain number, or refused with the way out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.core.errors import InputError
from mpctl.core.units import BANDWIDTH, COMPUTE, MEMORY, TIME, Measure, UnitError, parse_measure
from mpctl.spec.load import load_job, parse_settings

JOB = """
model = "gpt2"
[cluster]
preset = "selene"
nodes = 1
[cluster.device]
preset = "a100-80gb"
memory_bytes = "80 GiB"
memory_bandwidth = "2039 GB/s"
peak_flops = { bf16 = "312 TFLOP/s", fp16 = 312e12 }
[cluster.intra_node]
bandwidth = "2400 Gb/s"
latency = "3.4 us"
[launch]
timeout_seconds = "5 min"
[parallel]
bucket_bytes = "25 MiB"
"""


def test_units_in_a_file_are_plain_numbers_in_the_job(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(JOB, "utf-8")
    job = load_job(str(path))
    device, link = job.cluster.device, job.cluster.intra_node
    assert device is not None and link is not None
    assert (device.memory_bytes, device.memory_bandwidth) == (80 * 2**30, 2039e9)
    assert device.peak_flops["bf16"] == device.peak_flops["fp16"] == 312e12
    assert (link.bandwidth, link.latency) == (300e9, 3.4e-6)
    assert (job.launch.timeout_seconds, job.parallel.bucket_bytes) == (300.0, 25 * 2**20)
    assert '"memory_bytes":85899345920' in job.model_dump_json()


def test_a_setting_on_the_command_line_may_have_a_unit() -> None:
    typed = parse_settings(
        ["cluster=selene", "cluster.device.memory_bytes=40 GB", "cluster.inter_node.bandwidth=448GB/s"]
    )
    cluster = load_job(None, typed).cluster
    assert cluster.device is not None and cluster.device.memory_bytes == 40_000_000_000
    assert cluster.inter_node is not None and cluster.inter_node.bandwidth == 448e9


def test_several_links_of_a_node_are_written_as_people_write_them() -> None:
    for text in ("8 x 400 Gb/s", "8x400Gb/s", "8 × 50 GB/s"):
        assert parse_measure(text, BANDWIDTH) == 400_000_000_000
        assert re.fullmatch(BANDWIDTH.pattern, text)
    assert parse_measure("4 x 16 GiB", MEMORY) == 64 * 2**30


@pytest.mark.parametrize(
    ("setting", "value", "message", "hint"),
    [
        (
            "cluster.intra_node.bandwidth",
            "80 GiB",
            "it is memory, and a bandwidth is wanted",
            '"448 GB/s", or a number of bytes/s',
        ),
        (
            "cluster.device.memory_bytes",
            "80 GB/s",
            "it is a bandwidth, and memory is wanted",
            '"80 GiB", or a number of bytes',
        ),
        ("cluster.intra_node.latency", "5 TFLOP/s", "it is a rate of computing", '"5 us"'),
        ("cluster.device.peak_flops.bf16", "5 us", "it is a time", '"989 TFLOP/s"'),
        ("cluster.intra_node.bandwidth", "448 gb/s", "'gb/s' is no unit of bandwidth", "did you mean GB/s or Gb/s?"),
        ("cluster.inter_node.bandwidth", "200 GBps", "'GBps' is no unit of bandwidth", "did you mean GB/s?"),
        ("cluster.inter_node.bandwidth", "200 gbps", "'gbps' is no unit", "did you mean Gbps?"),
        ("cluster.device.memory_bytes", "80", "it has no unit", '"80 GiB"'),
        ("cluster.device.memory_bytes", "1e99 EB", "less than or equal to", ""),
        ("cluster.device.memory_bytes", "0 B", "greater than or equal to 1", ""),
        ("cluster.inter_node.bandwidth", "8 x 400", "it has no unit", '"448 GB/s"'),
        ("cluster.inter_node.bandwidth", "x 400 Gb/s", "is not a number with a unit", ""),
        ("cluster.intra_node.bandwidth", "-1 GB/s", "is not a number with a unit", '"448 GB/s"'),
    ],
)
def test_a_wrong_unit_is_refused_with_the_way_out(setting: str, value: str, message: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        load_job(None, {"cluster": "selene", setting: value})
    (issue,) = caught.value.issues
    assert issue.where == setting and message in issue.message and hint in issue.hint


def test_in_a_preset_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('preset = "selene"\n[intra_node]\nbandwidth = "80 GiB"\n', "utf-8")
    with pytest.raises(InputError) as caught:
        load_job(None, {"cluster": str(path)})
    (issue,) = caught.value.issues
    assert issue.where == str(path) and "'80 GiB': it is memory" in issue.message
    assert "448 GB/s" in issue.hint


@pytest.mark.parametrize("measure", [MEMORY, BANDWIDTH, COMPUTE, TIME])
@given(data=st.data())
def test_what_the_schema_s_pattern_takes_is_read_and_nothing_else(measure: Measure, data: Any) -> None:
    text = data.draw(st.one_of(st.from_regex(measure.pattern.replace("$", r"\Z")), st.text(max_size=12)))
    try:
        number = parse_measure(text, measure)
    except UnitError:
        assert re.search(measure.pattern.replace("$", r"\Z"), text) is None
    else:
        assert number >= 0


@pytest.mark.parametrize(
    ("text", "measure", "value"),
    [
        ("3.4 us", TIME, 3.4e-6),
        ("9.6 µs", TIME, 9.6e-6),
        ("2 h", TIME, 7200.0),
        ("1.5 TB/s", BANDWIDTH, 1.5e12),
        ("400 Gbit/s", BANDWIDTH, 50e9),
        ("400 Gbps", BANDWIDTH, 50e9),
        ("989.4 TFLOPS", COMPUTE, 989.4e12),
        ("1 TiB", MEMORY, 2.0**40),
        ("1 kB", MEMORY, 1e3),
    ],
)
def test_a_text_is_exactly_the_number_that_one_would_write(text: str, measure: Measure, value: float) -> None:
    assert float(parse_measure(text, measure)) == value
