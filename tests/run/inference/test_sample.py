"""`mpctl sample`: as a process on a finished run, against transformers, and what it refuses."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest
import torch

from mpctl.cli.trained import read_prompts
from mpctl.core.errors import InputError
from mpctl.core.tensor_grid import TensorGrid
from mpctl.model.families import get_prompt_form
from mpctl.render.sample import SampleView
from mpctl.run.hosts.machine import Machine
from mpctl.run.inference.evaluate import plan_evaluation
from mpctl.run.inference.sample import SamplingSettings, plan_sampling
from mpctl.run.inference.task import TaskOptions
from mpctl.run.inference.trained_model import open_trained
from mpctl.spec.job import JobSpec, complete
from mpctl.spec.training import TrainingSpec
from mpctl.train.data.prompts import TextStream
from mpctl.train.families.implementation import build_module
from mpctl.train.kernels.backend import TORCH_BACKEND
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.runtime.build import build_chunks
from mpctl.train.runtime.model_weights import load_chunks
from mpctl.train.runtime.partition import PipelinePartition
from mpctl.train.runtime.sampling import LoadedModel, TokenSampler, fill_masks, generate, make_text_states
from mpctl.train.transport.group import Group
from mpctl.train.weights.origin import open_origin
from mpctl.train.weights.writer import export_weights
from tests.cli.calls import Said, caller, spawn
from tests.run.launch.command import Launched, launch, wait_for
from tests.threads import run_ranks
from tests.train.layers.test_experts import Layout
from tests.train.weights.hub import load, truth

MACHINE = Machine(cores=2, gpus=0, memory_bytes=8 * 2**30)
PROMPTS = ("w7 counts", "w12 counts 4 w3", "")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    return caller(capsys)


def files(folder: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in sorted(folder.rglob("*"))}


@pytest.mark.slow
def test_text_from_a_run_at_tp_1_and_2(finished: Launched) -> None:
    """The same tokens at either tp, from a run at tp 2; the run is left as it was."""
    run, before = finished.run_dir, files(finished.run_dir)
    asked = [
        "sample",
        run,
        *(part for prompt in PROMPTS for part in ("--prompt", prompt)),
        "--temperature",
        0.9,
        "--top-p",
        0.9,
        "--max-tokens",
        6,
        "--json",
        "--log-probabilities",
    ]
    said = [spawn(*asked, "--tp", tp) for tp in (1, 2)]
    assert [(one.code, one.err) for one in said] == [(0, ""), (0, "")]
    one, two = (one.document["samples"] for one in said)
    assert [s["tokens"] for s in one] == [s["tokens"] for s in two]
    assert [s["text"] for s in one] == [s["text"] for s in two]
    assert all(len(s["tokens"]) == 6 or s["finish"] == "end-of-text" for s in one)
    assert [s["log_probabilities"] for s in one] == [pytest.approx(s["log_probabilities"], abs=1e-5) for s in two]
    assert said[0].document["step"] == 20
    assert files(run) == before


@pytest.mark.slow
def test_a_run_is_sampled_and_evaluated_while_it_trains(data: Path, tmp_path: Path) -> None:
    """It trains on, and one of its checkpoints of every third step is read."""
    more = ("--set", "training.steps=100000", "--set", "checkpoint.interval=3", "--set", "training.eval_samples=0")
    run = launch(data, tmp_path / "run", *more).at_step(4)
    said = [
        spawn("sample", run.run_dir, "--prompt", "w1", "--json", "--max-tokens", 4),
        spawn("eval", run.run_dir, "--samples", 2, "--json"),
    ]
    assert [one.code for one in said] == [0, 0], said
    assert all(one.document["step"] % 3 == 0 for one in said)
    at = len(run.records)
    run.at_step(at + 2)
    run.process.send_signal(signal.SIGINT)
    assert run.ended().summary["status"] == "stopped"


@pytest.mark.slow
def test_a_stream_ends_with_its_workers_when_it_is_interrupted(finished: Launched) -> None:
    """Ctrl-C once text has come: exit code 130, no process and no temporary folder left."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "mpctl",
            "sample",
            str(finished.run_dir),
            "--prompt",
            "w",
            "--temperature",
            "1",
            "--max-tokens",
            "31",
            "--seed",
            "3",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(finished.run_dir.parent)},
    )
    workers = wait_for(lambda: psutil.Process(process.pid).children())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    deadline = time.monotonic() + 60
    while any(worker.is_running() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(worker.is_running() for worker in workers)
    assert list(finished.run_dir.parent.glob("mpctl-*")) == []


# ---------------------------------------------------------------- against transformers


class Alone:
    """A mesh of one rank, as far as building a model asks."""

    tp = cp = Group()
    grid = TensorGrid()
    groups: Mapping[str, Group] = MappingProxyType({})
    tensor = groups
    device = torch.device("cpu")


def tokens_of_ours(folder: Path, prompts: list[list[int]], limit: int) -> list[list[int]]:
    """Greedy, all prompts in one batch, of a run or of a Hugging Face directory."""
    model = open_origin(folder).model
    job = complete(JobSpec(model=model))
    (module,) = chunks = build_chunks(PipelinePartition.of(job, 0), Alone(), TORCH_BACKEND)  # type: ignore[arg-type]
    load_chunks(chunks, model, folder)
    return _written(LoadedModel(module, model, Group(), Alone.device), prompts, limit)


def _written(loaded: LoadedModel, prompts: list[list[int]], limit: int) -> list[list[int]]:
    special = {"<pad>": 0}
    asked = [
        {"number": i, "tokens": prompt, "limit": limit, "ends": [], "special": special, "masks": []}
        for i, prompt in enumerate(prompts)
    ]
    texts = make_text_states(get_prompt_form(loaded.model), asked)
    found: list[list[int]] = [[] for _ in prompts]
    for chosen in generate(loaded, texts, TokenSampler()):
        for one in chosen:
            found[one.text].append(one.token)
    return found


@pytest.mark.parametrize(
    "kind",
    [
        "gpt2",
        "llama31-sharded",
        "t5",
        "qwen3_moe-sharded",
        "deepseek_v3-sharded",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "t51-sharded")),
    ],
)
def test_greedy_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Prompts of unequal lengths: ours in one batch, theirs one by one."""
    drawn = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 290, (n,), generator=drawn).tolist() for n in (11, 4, 7)]
    folder = truth(kind, tmp_path).folder
    theirs = load(folder)
    expected = []
    for prompt in prompts:
        said = theirs.generate(
            torch.tensor([prompt]),
            max_new_tokens=14,
            min_new_tokens=14,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=not kind.startswith("t5"),
        )[0].tolist()
        expected.append(said[1:] if kind.startswith("t5") else said[len(prompt) :])
    assert tokens_of_ours(folder, prompts, 14) == expected
    assert len({token for said in expected for token in said}) > 3


def _rank(rank: int, size: int, folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    layout = Layout(dp=size, ep=size)
    groups = layout.groups(rank)
    context = ShardContext(groups["tp"], groups["cp"], dtype=torch.float32, groups=groups, expert_view=layout.view)
    model = open_origin(folder).model
    module = build_module(model, TrainingSpec(), context)
    load_chunks([module], model, folder)
    return _written(LoadedModel(module, model, Group(), Alone.device, groups["dp"]), prompts, 9)


@pytest.mark.parametrize("texts", [1, 3])
def test_ranks_that_share_experts_write_texts_in_turn(texts: int, tmp_path: Path) -> None:
    """As one rank does, more and fewer texts than ranks."""
    folder = truth("deepseek_v3-sharded", tmp_path).folder
    prompts = [[5, 6, 7, 8, 9, 10, 11], [200, 3], [17, 40, 90, 111]][:texts]
    alone = tokens_of_ours(folder, prompts, 9)
    assert run_ranks(_rank, 2, folder, prompts) == [alone, alone]


def test_ranks_of_tp_do_not_write_with_experts(tmp_path: Path) -> None:
    folder = truth("deepseek_v3-sharded", tmp_path).folder
    with pytest.raises(InputError) as caught:
        plan_sampling(folder, ["a"], SamplingSettings(), MACHINE, TaskOptions(sizes={"tp": 2}))
    said = {issue.where: issue.hint for issue in caught.value.issues}
    assert said["--tp"] == "use --ep 2"


def test_masked_words_are_those_of_transformers(tmp_path: Path) -> None:
    folder = truth("bert", tmp_path).folder
    model = open_origin(folder).model
    (module,) = chunks = build_chunks(PipelinePartition.of(complete(JobSpec(model=model)), 0), Alone(), TORCH_BACKEND)  # type: ignore[arg-type]
    load_chunks(chunks, model, folder)
    prompt, masks = [5, 9, 200, 31, 77, 12], [2, 4]
    with torch.no_grad():
        logits = load(folder)(torch.tensor([prompt])).prediction_logits[0]
    asked = {"number": 0, "tokens": prompt, "limit": 1, "ends": [], "special": {}, "masks": masks}
    texts = make_text_states(get_prompt_form(model), [asked])
    loaded = LoadedModel(module, model, Group(), Alone.device)
    steps = list(fill_masks(loaded, texts, TokenSampler()))
    assert [one.token for step in steps for one in step] == logits[masks].argmax(-1).tolist()


# ---------------------------------------------------------------- refusals, in this process


def test_what_cannot_be_continued_is_reported_at_once(
    finished: Launched, call: Callable[..., Said], tmp_path: Path
) -> None:
    run = finished.run_dir

    def rules(*arguments: object) -> dict[str, dict[str, str]]:
        said = call("sample", *arguments, "--json")
        assert said.code == 2
        return said.issues

    assert "no-weights" in rules(tmp_path, "--prompt", "x")
    assert "no-prompt" in rules(run)
    issue = rules(run, "--prompt", "x", "--step", 7)["no-such-step"]
    assert issue["hint"] == "it has checkpoints of step 10, 20"
    issue = rules(run, "--prompt", "w1 counts " * 30)["prompt-fits-model"]
    assert "exceed the model's 32 positions" in issue["message"]
    issue = rules(run, "--prompt", "w1", "--max-tokens", 31)["prompt-fits-model"]
    assert issue["where"] == "prompt 1"
    assert issue["hint"].startswith("use --max-tokens 30 or")
    assert "no-effect" in rules(run, "--prompt", "x", "--top-k", 5)
    assert rules(run, "--prompt", "x", "--stop", "")["bad-value"]["where"] == "--stop"
    assert "bad-value" in rules(run, "--prompt", "x", "--temperature", "inf")
    assert "tp-divides-heads" in rules(run, "--prompt", "x", "--tp", 3)
    assert "world-fits-machine" in rules(run, "--prompt", "x", "--device", "cuda")
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    assert rules(run, "--prompts", lines)["prompts-jsonl"]["where"] == f"{lines}:2"
    lines.write_text('{"prompt": "a\u2028b\x85"}\n\n{"text": "b"}\n', "utf-8")
    assert rules(run, "--prompts", lines)["prompts-jsonl"]["where"] == f"{lines}:3"
    lines.with_suffix(".txt").write_bytes("a\u2028b\r\n\nc\n".encode())
    assert read_prompts(["x"], str(lines.with_suffix(".txt"))) == ["x", "a\u2028b", "c"]


def test_the_newest_undamaged_checkpoint_is_used(finished: Launched, tmp_path: Path) -> None:
    run = shutil.copytree(finished.run_dir, tmp_path / "run")
    (run / "checkpoints" / "step-20" / "shard-1.safetensors").unlink()
    trained = open_trained(run)
    assert (trained.step, trained.origin.name) == (10, "step-10")
    (warning,) = trained.warnings
    assert "step-20 is damaged" in warning
    with pytest.raises(InputError, match="shard-1"):
        open_trained(run, step=20)
    (run / "checkpoints" / "step-10" / "manifest.json").write_text("{")
    with pytest.raises(InputError) as caught:
        open_trained(run)
    assert len(caught.value.issues) == 2


def test_a_checkpoint_with_a_changed_byte_is_not_used(finished: Launched, tmp_path: Path) -> None:
    """Its sizes are right; it is passed over, or refused where it is asked for by name."""
    run = shutil.copytree(finished.run_dir, tmp_path / "run")
    newest = run / "checkpoints" / "step-20"
    changed = bytearray((newest / "shard-0.safetensors").read_bytes())
    changed[-5] ^= 1
    (newest / "shard-0.safetensors").write_bytes(changed)
    seen: list[tuple[str, int, int]] = []
    sampling = plan_sampling(run, ["w"], SamplingSettings(), MACHINE, on_verify=lambda *said: seen.append(said))
    evaluation = plan_evaluation(run, [], MACHINE)
    for trained in (sampling.trained, evaluation.trained):
        assert trained.step == 10
        (warning,) = trained.warnings
        assert "step-20 is damaged" in warning and "sha256 differs" in warning
    assert seen[-1][0] == "verify" and seen[-1][1] == seen[-1][2] > 0
    for path, step in ((run, 20), (newest, None)):
        with pytest.raises(InputError, match="sha256 differs"):
            open_trained(path, step=step)


def test_a_missing_model_is_reported(finished: Launched, tmp_path: Path, call: Callable[..., Said]) -> None:
    run = shutil.copytree(finished.run_dir, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    calls = (("sample", "--prompt", "x"), ("eval",), ("weights", "export", tmp_path / "out"))
    for path, message in ((tmp_path / "nowhere", "no such file or folder"), (run, "is a run, but has no checkpoint")):
        for words in calls:
            given = [*words[:2], path, words[2]] if "export" in words else [*words, path]
            said = call(*given, "--json")
            assert (said.code, said.issues["no-weights"]["message"]) == (2, message)
        (run / "checkpoints").mkdir(exist_ok=True)  # an empty folder is no checkpoint either


def test_a_run_and_its_export_write_the_same(finished: Launched, tmp_path: Path) -> None:
    """The exported directory names its end token, and its tokenizer is the run's."""
    export_weights(finished.run_dir, tmp_path / "hf")
    own, hub = (
        plan_sampling(path, ["w7 counts", ""], SamplingSettings(), MACHINE)
        for path in (finished.run_dir, tmp_path / "hf")
    )
    assert hub.encoder.ends == own.encoder.ends
    prompts = [list(sample.encoded.tokens) for sample in own.texts]
    assert [list(sample.encoded.tokens) for sample in hub.texts] == prompts
    from_run = tokens_of_ours(finished.run_dir, prompts, 8)
    assert from_run == tokens_of_ours(tmp_path / "hf", prompts, 8)


def test_by_default_a_text_gets_the_positions_that_its_prompt_leaves(finished: Launched) -> None:
    sampling = plan_sampling(finished.run_dir, ["w7 counts", ""], SamplingSettings(), MACHINE)
    first, empty = sampling.texts
    assert first.encoded.limit + len(first.encoded.tokens) == 32
    assert empty.encoded.tokens == sampling.encoder.ends


# ---------------------------------------------------------------- tokens to text


def test_a_stop_string_ends_a_text_and_is_never_shown(finished: Launched) -> None:
    """`counts` comes in several tokens; a possible beginning of it waits."""
    settings = SamplingSettings(stop=("counts",))
    (sample,) = plan_sampling(finished.run_dir, ["w"], settings, MACHINE).texts
    ids = sample.stream.tokenizer.encode("1 w7 counts 5").ids
    shown = ""
    for place, token in enumerate(ids):
        finish = "length" if place == len(ids) - 1 else None
        sample.add((0, 0, token, -1.0, False, finish), 0.5)
        shown += sample.fresh()
    assert (shown, sample.text, sample.finish) == ("1 w7 ", "1 w7 ", "stop")


def test_characters_of_several_tokens_are_written_at_once(finished: Launched) -> None:
    tokenizer = plan_sampling(finished.run_dir, ["w"], SamplingSettings(), MACHINE).encoder.tokenizer
    text = "é漢w7"
    stream = TextStream(tokenizer, tokenizer.encode("w").ids)
    pieces = [stream.push(token) for token in tokenizer.encode(text).ids]
    assert "".join(pieces) + stream.rest() == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert "" in pieces


def test_a_long_text_is_written_like_a_short_one_without_storing_its_beginning(finished: Launched) -> None:
    tokenizer = plan_sampling(finished.run_dir, ["w"], SamplingSettings(), MACHINE).encoder.tokenizer
    text = " ".join(f"é漢w{number}\n" for number in range(200))
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokenizer.encode(text).ids]
    assert "".join(pieces) + stream.rest() == text and len(pieces) > 1000
    assert all("\ufffd" not in piece for piece in pieces)
    assert len(stream.tokens) < 100


def test_text_of_a_model_steers_no_terminal(finished: Launched, capsys: pytest.CaptureFixture[str]) -> None:
    """The prompt too, streamed or not; line breaks and tabs stay."""
    hostile = "a\x1b[31m\nb\x9b2J\tc\x07"
    for prompts in ([hostile], [hostile, "w"]):
        sampling = plan_sampling(finished.run_dir, prompts, SamplingSettings(), MACHINE)
        for sample in sampling.texts:
            sample.text, sample.finish = hostile, "length"
        with SampleView(sampling, is_silent=False) as view:
            view.show(sampling.texts)
        said = capsys.readouterr().out
        assert said.count("a[31m\nb2J\tc") == (2 if len(prompts) == 1 else 3)
        assert not set("\x1b\x9b\x07") & set(said)
