"""Chat data small enough to train on in seconds: 60 conversations of one or two turns, in rows of 64 tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from mpctl.spec.job import JobSpec
from mpctl.train.data.chat_prepare import ChatSettings, prepare_chat
from mpctl.train.data.tokenizer import train_tokenizer
from tests.train.runtime.tiny import VOCAB, tiny_job

LENGTH = 64
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'judge' %}{{ raise_exception('no role judge') }}{% endif %}"
    "<{{ m.role[0] }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}\n"
    "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)


def write_lines(path: Path, count: int = 60) -> Path:
    """Conversations as .jsonl; returns the file."""
    draw, lines = random.Random(3), []
    for _ in range(count):
        turns = []
        for _ in range(draw.choice((1, 1, 2))):
            a, b = draw.randrange(20), draw.randrange(20)
            turns += [("user", f"{a} + {b}?"), ("assistant", f"{a + b}" + " yes" * draw.randrange(6))]
        lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    path.write_text("\n".join(lines))
    return path


def make_tokenizer(folder: Path) -> Path:
    """A tokenizer of the tiny job's vocabulary next to its chat template; returns its folder."""
    folder.mkdir()
    texts = [f"{a} + {b} <user> <assistant> yes" for a in range(20) for b in range(20)]
    train_tokenizer(texts, vocab_size=VOCAB).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def make_chat_data(folder: Path, **changes: Any) -> Path:
    """Prepared chat data; returns its directory."""
    lines, tokenizer = write_lines(folder / "lines.jsonl"), folder / "tokenizer"
    if not tokenizer.is_dir():
        make_tokenizer(tokenizer)
    settings = ChatSettings(str(tokenizer), LENGTH, validation_fraction=0.2, vocab_size=VOCAB, **changes)
    return prepare_chat([lines], folder / f"data-{changes.get('packing', '')}", settings).path


def chat_job(data: Path, tp: int = 1, dp: int = 1, **changes: Any) -> JobSpec:
    """The tiny job, which trains on chat data."""
    return tiny_job(data, tp, dp, model__seq_length=LENGTH, **changes)
