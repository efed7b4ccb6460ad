"""`mpctl data chat` from the outside, on the example's conversations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpctl.cli.app import run
from mpctl.run.launch.data_checks import data_issues
from mpctl.spec.load import load_job
from tests.train.runtime.chat import LENGTH, make_chat_data, make_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "chat"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("chat") / "tokenizer")


def prepare(tmp_path: Path, tokenizer: Path, *options: str) -> int:
    fixed = ["--out", f"{tmp_path}/d", "--tokenizer", str(tokenizer), "--validation-fraction", "0.2"]
    template = ["--template", str(EXAMPLE / "template.jinja")]
    return run(["data", "chat", str(EXAMPLE / "messages.jsonl"), *fixed, *template, *options])


def test_prepare_and_show(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare(tmp_path, tokenizer, "--seq-length", "640") == 0
    said = capsys.readouterr().out
    assert "640 tokens" in said and "mpctl data chat" in said and "--set model.seq_length=640" in said
    assert run(["data", "show", f"{tmp_path}/d", "--row", "0"]) == 0
    shown = capsys.readouterr().out
    assert "│ <|im_start|>assistant\n│ «" in shown and "<|im_end|>»" in shown
    assert run(["data", "show", f"{tmp_path}/d", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    runs = [one for conversation in document["row"] for one in conversation]
    assert all(one["text"].endswith("<|im_end|>") for one in runs if one["counted"])
    assert document["chat"]["splits"]["train"]["counted"] > 0
    assert run(["data", "show", f"{tmp_path}/d", "--row", "99"]) == 2
    assert "there is no row 99" in capsys.readouterr().err


def test_a_long_conversation_is_refused_with_a_way_out(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(tmp_path, tokenizer, "--seq-length", "100") == 2
    said = capsys.readouterr().err
    assert "hold more than 100 tokens; the longest has" in said and "--overflow drop, truncate or split" in said
    assert list(tmp_path.iterdir()) == []


def test_a_launch_compares_the_job_with_its_data(tmp_path: Path) -> None:
    data = str(make_chat_data(tmp_path))
    job = load_job("demo", {"data.path": data, "model.vocab": 300, "model.seq_length": LENGTH})
    assert job.model is not None and list(data_issues(job, job.model, None)) == []
    longer = job.model.model_copy(update={"seq_length": 128})
    assert [issue.rule for issue in data_issues(job, longer, None)] == ["chat-seq-length"]
    other = job.data.model_copy(update={"chat": job.data.chat and job.data.chat.model_copy(update={"packing": "none"})})
    changed = job.model_copy(update={"data": other})
    (issue,) = data_issues(changed, job.model, None)
    assert (issue.rule, issue.where) == ("chat-as-prepared", "data.chat.packing")
    text = job.model_copy(update={"data": job.data.model_copy(update={"chat": None})})
    assert [issue.rule for issue in data_issues(text, job.model, None)] == ["chat-as-prepared"]


def test_conversations_as_corpus_need_a_tokenizer() -> None:
    lines = str(EXAMPLE / "messages.jsonl")
    job = load_job("demo", {"data.corpus": [lines], "data.chat.packing": "wrapped"})
    assert job.model is not None
    assert [issue.rule for issue in data_issues(job, job.model, None)] == ["chat-tokenizer"]
