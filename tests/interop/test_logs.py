"""Logs of other launchers: steps, what is left out of them, mixed runs, and any text at all."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpctl.core.errors import InputError
from mpctl.interop import log_lines
from mpctl.interop.log_launchers import LOGS, STEP_LINES, is_beside, looked_for
from mpctl.interop.logs import LEAST, read_log, read_log_file
from tests.interop import example_logs as logs


def refusal(text: str, launcher: str | None = None) -> dict[str, str]:
    """Rules and words of the issues of a log that is no run."""
    with pytest.raises(InputError) as caught:
        read_log(text, launcher)
    return {issue.rule: str(issue) for issue in caught.value.issues}


@pytest.mark.parametrize("name", logs.LOGS)
def test_each_launchers_steps_are_found_without_their_warm_up(name: str) -> None:
    run = read_log(logs.LOGS[name]())
    assert run.launcher == name
    assert len(run.steps) == len(logs.TIMES) - 2 and run.dropped == {"warm-up": 2}
    durations = [step.duration for step in run.steps]
    assert (run.step_seconds is None) == (name == "torchtitan")  # which prints rates alone
    scale = logs.STEP / median(durations)
    assert [d * scale for d in durations] == pytest.approx(logs.TIMES[2:], rel=0.006)
    if run.step_seconds is not None:
        assert run.step_seconds == pytest.approx(logs.STEP, rel=0.006)
    assert run.spread is not None and 0 < run.spread < 0.02


def test_every_log_has_an_example() -> None:
    assert set(logs.LOGS) == set(LOGS)


def test_figures_beside_the_seconds_are_read_in_the_units_of_their_launcher() -> None:
    megatron, nanotron = read_log(logs.megatron()), read_log(logs.nanotron())
    assert (megatron.world_size, megatron.figure("batch")) == (logs.WORLD, logs.BATCH)
    assert megatron.figure("tflops") == pytest.approx(400, rel=0.01)
    rate = logs.BATCH * logs.LENGTH / logs.STEP
    assert nanotron.tokens_per_second == pytest.approx(rate, rel=0.01)
    assert nanotron.world_size == 16  # dp 4 x pp 2 x tp 2 of its config
    titan = read_log(logs.torchtitan())
    assert titan.tokens_per_second == pytest.approx(rate, rel=0.01)
    assert titan.config.values["model.flavor"] == "8B"
    rates = read_log(logs.deepspeed_rates())
    assert rates.figure("samples_per_second") == pytest.approx(logs.BATCH / logs.STEP, rel=0.01)


def test_forks_print_the_same_words_otherwise() -> None:
    """Primus has current/mean, Megatron-DeepSpeed seconds."""
    primus = logs.megatron().replace(" | throughput", "/9999.9 | throughput")
    assert read_log(primus).step_seconds == pytest.approx(logs.STEP, rel=0.01)
    line = " iteration {:8d}/ 9 | elapsed time per iteration (s): 105.35 | TFLOPs: 148.2 |"
    bloom = read_log("\n".join(line.format(n) for n in range(1, 8)))
    assert (bloom.step_seconds, bloom.figure("tflops")) == (105.35, 148.2)


def test_steps_after_checkpoints_ramps_and_outliers_are_left_out_and_counted() -> None:
    """By hand: 20 lines of 2 s; a checkpoint before the 6th, 40 s at the 9th, others' batches."""
    rows = logs.megatron((2.0,) * 20).splitlines()
    rows[4] = rows[4].replace("size:    32", "size:    64")
    rows[9] = rows[9].replace("(ms): 2000.0", "(ms): 40000.0")
    rows.insert(6, "saving checkpoint at iteration       5 to /checkpoints in torch_dist format")
    run = read_log("\n".join(rows))
    assert run.dropped == {"warm-up": 2, "after a checkpoint or evaluation": 1, "of another batch": 1, "outlier": 1}
    assert len(run.steps) == 15 and run.step_seconds == 2.0
    assert "15 steady lines, left out: 2 warm-up, 1 after a checkpoint" in run.text


def test_where_each_line_follows_a_checkpoint_none_is_left_out_for_it() -> None:
    rows = logs.megatron((2.0,) * 6).replace("\n", "\nsaving checkpoint at iteration 1\n")
    assert read_log(rows).dropped == {"warm-up": 2}


def test_restarts_are_one_run_and_each_has_a_warm_up() -> None:
    rows = logs.megatron((9.0, 2.0, 2.0, 2.0, 2.0)).splitlines()
    again = [rows[0], *(row.replace("iteration        ", "iteration ") for row in rows[1:])]
    run = read_log("\n".join([*rows, *again]))
    assert run.restarts == 1 and run.dropped == {"warm-up": 4} and len(run.steps) == 6


def test_other_ranks_and_repeated_lines_are_no_restart() -> None:
    """srun --label and torchrun --tee print every rank; without a label the lines are mixed."""
    rows = logs.deepspeed().splitlines()
    for prefixes in (
        ("0: ", "1: "),
        ("[default0]:", "[default7]:"),
        ("[rank0]: ", ""),
        ("", ""),
        ("[default0]:[rank0]: ", "[default1]:[rank1]: "),
    ):
        text = "\n".join(f"{prefix}{row}" for row in rows for prefix in prefixes)
        run = read_log(text)
        assert (run.restarts, len(run.steps)) == (0, len(rows) - 2)


def test_arguments_are_found_behind_what_a_cluster_puts_before_its_lines() -> None:
    rows = logs.megatron(arguments=logs.ARGUMENTS).splitlines()
    for prefix in ("[default0]:[rank0]:", "3: ", "2026-11-01T10:00:00.1Z ", "[pod/a-0/x] "):
        run = read_log("\n".join(prefix + row for row in rows))
        assert run.config.values["tensor_model_parallel_size"] == "4"
        assert run.config.values["recompute_modules"] == "['core_attn']"
        assert run.config.values["vocab_size"] == "128256" and run.world_size == 16


def test_several_runs_in_a_log_are_refused_with_the_line_to_cut_at() -> None:
    one = logs.megatron(arguments=logs.ARGUMENTS)
    line = one.count("\n") + 2
    other = one.replace("model_parallel_size ...................... 4", "model_parallel_size ...... 2")
    told = refusal(one + other)["log-mixed"]
    assert f"tensor_model_parallel_size 4 becomes 2 from line {line} on" in told
    assert f"cut the log at line {line}" in told
    more = logs.megatron().replace("world size: 16", "world size: 32")
    told = refusal(logs.megatron() + more)["log-mixed"]
    assert f"16 ranks at line 1 and 32 at line {len(logs.TIMES) + 2}" in told
    slower = logs.deepspeed([2 * t for t in logs.TIMES])
    told = refusal(f"{logs.deepspeed()}\n{slower}")["log-mixed"]
    assert "line 1 on and of line 8 on" in told and "differ by 100 % (2.00 s and 4.01 s)" in told
    again = one.replace("iters ..................................... 500", "iters ... 900")
    assert again != one and read_log(one + again).restarts == 1  # a restart
    other = one.replace("['core_attn']", "['core_attn', 'mlp']")
    assert "recompute_modules ['core_attn'] becomes" in refusal(one + other)["log-mixed"]


OF_ONE_RUN = {frozenset(("trainer", name)) for name in logs.LOGS}
"""Launchers that print beside each other, and bars, which are of loading too."""


@pytest.mark.parametrize("one", logs.LOGS)
@pytest.mark.parametrize("other", logs.LOGS)
def test_runs_of_two_launchers_are_refused_with_the_line_to_cut_at(one: str, other: str) -> None:
    """Also with the settings that each prints, and whichever launcher the user names."""
    configs = {"megatron": logs.ARGUMENTS}
    first = f"{configs.get(one, '')}{logs.LOGS[one]()}\n"
    text = f"{first}{configs.get(other, '')}{logs.LOGS[other]()}"
    if frozenset((one, other)) in OF_ONE_RUN or one == other:
        run = read_log(text)
        assert run.launcher in (one, other)
        assert not run.config.kind or is_beside(run.config.kind, run.launcher)
        return
    cut = first.count("\n") + 1
    for launcher in (None, one, other):
        told = refusal(text, launcher)["log-mixed"]
        assert f"steps of {one} from line " in told and f"and of {other} from line " in told
        (line,) = map(int, re.findall(r"cut the log at line (\d+) ", told))
        assert cut <= line <= cut + 1  # nanotron prints a line before its settings
        assert read_log("\n".join(text.split("\n")[: line - 1])).launcher == one
        assert read_log("\n".join(text.split("\n")[line - 1 :])).launcher == other


def test_settings_of_another_launcher_are_not_those_of_the_steps() -> None:
    """A run that ended before its first step stands before the one that was measured."""
    ended = f"using world size: 64\n{logs.ARGUMENTS.replace('size .......... 16', 'size ... 64')}"
    titan = read_log(f"{ended}{logs.torchtitan(dp=8)}")
    assert (titan.config.kind, titan.world_size) == ("torchtitan", 8)
    assert "num_layers" not in titan.config.values
    assert read_log(f"{ended}{logs.trainer()}").config.kind == ""
    again = read_log(ended + logs.megatron(arguments=logs.ARGUMENTS))
    assert again.world_size == 16 and again.config.values["world_size"] == "16"


def test_two_runs_of_a_launcher_that_differ_in_their_batch_are_refused() -> None:
    """By the batch of the same step, or where none is printed by the rate at the same time."""
    told = refusal(logs.megatron() + logs.megatron(batch=64))["log-mixed"]
    assert "step 1 has 32 samples at line 2 and 64 samples at line 10: more than one run" in told
    rates = logs.deepspeed([t / 2 for t in logs.TIMES])
    rates = "\n".join(
        f"{row.split('samples')[0]}{double[double.index('samples') :]}"
        for row, double in zip(logs.deepspeed().splitlines(), rates.splitlines(), strict=True)
    )
    told = refusal(f"{logs.deepspeed()}\n{rates}")["log-mixed"]
    assert "differ by 100 % (16 and 32 samples/s)" in told
    ramp = [logs.megatron((2.0,) * 9).splitlines()[n] for n in range(10)]
    ramp[1:5] = [row.replace("size:    32", "size:    16") for row in ramp[1:5]]
    restarted = read_log("\n".join([*ramp, *ramp[3:]]))
    assert restarted.restarts == 1 and restarted.figure("batch") == logs.BATCH


@pytest.mark.parametrize("figure", ["nan", "-nan", "inf", "-inf", "Infinity", "0.0", "-5", "1e999"])
def test_a_time_that_is_no_number_above_0_is_no_step(figure: str) -> None:
    rows = logs.megatron((2.0,) * 9).splitlines()
    rows[5] = rows[5].replace("(ms): 2000.0", f"(ms): {figure}")
    rows[6] = rows[6].replace("global batch size:    32", f"global batch size: {figure}")
    rows[7] = rows[7].replace("(TFLOP/s/GPU): 400.0", f"(TFLOP/s/GPU): {figure}")
    run = read_log("\n".join(rows))
    assert (run.step_seconds, run.figure("tflops"), len(run.steps)) == (2.0, 400.0, 6)
    rows = [row.replace("(ms): 2000.0", f"(ms): {figure} | samples per second: 3") for row in rows]
    assert "log-too-short" in refusal("\n".join(rows)) or "log-no-figures" in refusal("\n".join(rows))


def test_what_is_missing_is_said() -> None:
    told = refusal("Loading weights\nDone\n")["log-no-figures"]
    assert all(words in told for words in looked_for()) and "12/100 [00:20<" in told
    told = refusal(logs.megatron((2.0,) * LEAST))["log-too-short"]
    assert f"2 steady lines of {LEAST} lines with a step of megatron" in told
    assert "left out: 1 warm-up" in told and f"{LEAST} are needed" in told
    assert "those of torchtitan" in refusal(logs.torchtitan(), "deepspeed")["log-no-figures"]
    assert "use megatron" in refusal("", "horovod")["log-launcher"]


def test_a_summary_counts_where_there_is_nothing_better() -> None:
    run = read_log(logs.SUMMARY)
    assert (run.step_seconds, run.steps, run.spread) == (2.0, (), None)
    assert read_log(logs.trainer() + logs.SUMMARY).steps
    assert read_log(logs.trainer(), "accelerate").launcher == "trainer"


def test_a_file_is_read_in_pieces_whose_ends_lie_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.log"
    path.write_text(logs.trainer() + logs.deepspeed(), encoding="utf-8")
    whole = read_log(path.read_bytes().decode())
    for size in (7, 64, 1000):
        monkeypatch.setattr(log_lines, "PIECE", size)
        assert read_log_file(path) == whole
    with pytest.raises(InputError, match="no-such"):
        read_log_file(tmp_path / "no-such.log")


def test_lines_are_bounded_and_nothing_of_a_log_is_an_escape_sequence() -> None:
    long = "x" * (3 * log_lines.LONGEST)
    (line,) = log_lines.lines_of([f"\x1b]0;title\x07\x1b[31m{long}"])
    assert line.text == "x" * len(line.text) and len(line.text) <= log_lines.LONGEST
    hostile = logs.megatron(arguments=logs.ARGUMENTS)
    other = hostile.replace("size ...................... 4", "size ...... \x1b[2J\x9b31m8\x07")
    (told,) = refusal(hostile + other).values()
    assert told.isprintable() and "becomes 8" in told.replace("[2J", "").replace("31m", "")


WORDS = [
    *(line.mark for *_, line in STEP_LINES),
    *(words for *_, line in STEP_LINES for words in line.figures.get("number", ())),
    "nan",
    "-inf",
    "iteration",
    "step:",
    "1.5",
    "1e999",
    "-1e999",
    "-3",
    "0",
    "/",
    "|",
    ":",
    "=",
    "\n",
    "\r",
    "\x1b[31m",
    "K",
    "12/100 [00:20<02:20, 1.60s/it]",
    "---- arguments ----",
    "world_size ...... 0",
    "Config(general=GeneralArgs(",
    ")",
    "Running with configs: {",
    "}",
    "MEMBER: 1/",
    "8",
    "device mesh with ['dp_shard', 'tp'], [4, 2]",
    "'train_steps_per_second': 0",
    "[rank9]:",
]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(WORDS) | st.text(max_size=8), max_size=60).map(" ".join))
def test_any_text_is_a_run_or_refused_in_words(text: str) -> None:
    try:
        run = read_log(text)
    except InputError as error:
        assert all(issue.message and issue.hint for issue in error.issues)
    else:
        assert run.average or len(run.steps) >= LEAST
        assert all(step.duration > 0 for step in run.steps)


def test_a_log_cut_in_its_last_batch_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    whole = logs.megatron((2.0,) * 12)
    cut = whole.rindex("global batch size:    32") + len("global batch size:    3")
    path.write_text(whole[:cut] + "\n", "utf-8")
    run = read_log_file(path)
    assert len(run.steps) == 9 and {step.batch for step in run.steps} == {32}
