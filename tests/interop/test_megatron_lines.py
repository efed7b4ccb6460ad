"""The results of --from and --emit for a command line, against Megatron-LM's own parser.

Each line of megatron_lines.py goes through the real parser; mpctl reads it and writes it again, and
that goes through the parser too. The two namespaces, of some 800 fields, are the same but for the
fields of flags that a warning names and for other spellings of one thing (`said_once`).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from mpctl.core.sharding import padded_vocab
from mpctl.interop.from_megatron import layer_counts, read_megatron
from mpctl.interop.mapping import ReadJob
from mpctl.plan.planning.plan import Plan, load_plan
from tests.interop.megatron_lines import lines
from tests.interop.megatron_parser import Line, parse_lines, words_of

Namespace = dict[str, Any]
LINES = lines()
FOLLOWS = {
    "main_grads_dtype": ["accumulate_allreduce_grads_in_fp32"],
    "step_batch_size_schedule": ["global_batch_size", "eval_global_batch_size"],
    "fp8_recipe": ["stream_ckpt_dequant"],
    "transformer_impl": ["attention_backend"],
}
"""Fields that Megatron-LM derives from the field of a flag that is not read as it is."""
UNSAID = ("train_iters", "lr")  # without a default there; written with mpctl's, or of samples
SPELLINGS = (
    "deprecated_use_mcore_models",
    "_is_global_batch_size_explicitly_specified",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "make_vocab_size_divisible_by",
    "padded_vocab_size",
    "lr_warmup_fraction",
    "lr_warmup_iters",
    "attention_backend",
    "recompute_modules",
    "add_position_embedding",
    "lr_warmup_samples",
    "lr_decay_iters",
    "lr_decay_samples",
    "train_samples",
    "moe_enable_deepep",
)
"""Fields that say what others say as well: `said_once` compares that, the number of chunks is a
field of its own, and beside rotary positions Megatron-LM reads nothing of the last."""
CUTS = ("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
"""Fields that cut the layers; of a layout the plan's stages are compared with its parts."""


class Compared(NamedTuple):
    """A line as it was read and planned, with the namespaces of its own text and of the plan's."""

    read: ReadJob
    plan: Plan
    own: Namespace
    written: Namespace


class Answers(NamedTuple):
    """All lines; names: the field of each flag."""

    names: dict[str, str]
    lines: dict[str, Compared]


@pytest.fixture(scope="module")
def answers() -> Answers:
    """One process of the parser's interpreter answers for all lines."""
    texts, plans = [], {}
    for name, (variation, text) in LINES.items():
        environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if variation.connects_once else {}
        read = read_megatron(text)
        ranks = {"cluster.nodes": 1, "cluster.gpus_per_node": variation.ranks}
        plans[name] = read, load_plan(None, {**read.settings, **ranks})
        for words in (shlex.split(text), words_of(plans[name][1])):
            texts.append(Line(words, variation.ranks, environment))
    parsed = parse_lines(texts)
    wrong = [answer["error"] for answer in parsed.answers if "error" in answer]
    assert not wrong, wrong[0]
    spaces = [answer["namespace"] for answer in parsed.answers]
    pairs = zip(LINES, spaces[::2], spaces[1::2], strict=True)
    return Answers(parsed.names, {n: Compared(*plans[n], *pair) for n, *pair in pairs})


@pytest.mark.slow
@pytest.mark.timeout(600)  # of the first: all lines are parsed in its fixture
@pytest.mark.parametrize("name", LINES)
def test_a_line_is_read_and_written_as_megatron_has_it(name: str, answers: Answers) -> None:
    line = answers.lines[name]
    assert len(line.own) > 700
    assert said_once(line.own) == said_once(line.written)
    named = {answers.names[flag] for flag in named_flags(line.read)}
    named.update(field for flag in [*named] for field in FOLLOWS.get(flag, ()))
    named.update(field for field in UNSAID if line.own[field] is None)
    named.update(CUTS if line.own["pipeline_model_parallel_layout"] else ())
    differ = {field for field in line.own if line.own[field] != line.written[field]}
    assert differ - named - {*SPELLINGS} == set()


@pytest.mark.slow
@pytest.mark.timeout(600)  # of the first: all lines are parsed in its fixture
@pytest.mark.parametrize("name", LINES)
def test_a_plan_has_the_sizes_that_megatron_derives(name: str, answers: Answers) -> None:
    _, plan, own, _ = answers.lines[name]
    job = plan.job
    assert job.model is not None
    assert job.sizes["dp"] == own["data_parallel_size"]
    assert job.parallel.vpp == (own["virtual_pipeline_model_parallel_size"] or 1)
    samples = own["train_samples"]
    assert samples is None or job.training.steps == samples // own["global_batch_size"]
    assert (job.model.ffn, job.model.head_size) == (own["ffn_hidden_size"], own["kv_channels"])
    if own["pipeline_model_parallel_layout"]:
        stages = [sum(stop - start for start, stop in chunks) for chunks in plan.stages or ()]
        assert stages == layer_counts(own["pipeline_model_parallel_layout"])


def named_flags(read: ReadJob) -> list[str]:
    """The flags that the warnings of a reading name."""
    words = [word for w in read.warnings for word in (w.where, *w.message.split(": ")[0].split())]
    return [flag for word in words if (flag := word.strip(",")).startswith("--") and flag != "--from"]


def said_once(space: Mapping[str, Any]) -> dict[str, object]:
    """What several fields say together: the attention, what of it is computed again, the warm-up
    and the rows of the word table."""
    backend = space["attention_backend"].rpartition(".")[2]
    is_local = space["transformer_impl"] == "local"
    batch = space["global_batch_size"]
    warmup = space["lr_warmup_iters"] or space["lr_warmup_samples"] // batch
    if space["lr_warmup_fraction"]:
        warmup = round(space["lr_warmup_fraction"] * space["lr_decay_iters"])
    tp, divisor = space["tensor_model_parallel_size"], space["make_vocab_size_divisible_by"]
    rows = padded_vocab(space["vocab_size"], tp=tp, divisor=divisor)
    is_selective = space["recompute_granularity"] == "selective"
    return {
        "modules": space["recompute_modules"] or ["core_attn"] * is_selective or None,
        "attention": "unfused" if is_local or backend == "unfused" else "flash",
        "warmup": warmup,
        "decay": space["lr_decay_iters"] or (space["lr_decay_samples"] or 0) // batch,
        "rows": space["padded_vocab_size"] or rows,
    }
