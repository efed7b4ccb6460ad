"""The table of docs/models.md: what of each variant of a model trains, has weights and is emitted, then
the variants that are refused.

`python -m tests.model.families.models_page` writes it anew. Every cell is the answer of the code for a
small config of the variant (hf_configs.py).
"""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from mpctl.core.errors import InputError
from mpctl.interop.emitted import emit_plan
from mpctl.interop.registry import TARGETS
from mpctl.plan.planning.plan import Plan, make_plan
from mpctl.plan.rules.launched import not_launched
from mpctl.spec.load import load_job
from mpctl.spec.model import ModelSpec
from mpctl.train.weights.names import builtin_schemes, get_scheme
from tests.model.families.hf_configs import CONFIGS, EXPERTS, OTHERS, REFUSED

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
START, END = "<!-- table: python -m tests.model.families.models_page -->\n", "<!-- end -->"
GLM = "glm"  # no class of transformers: by a preset
HEAD = ("model", "`model_type`", "trains", "weights", "`--emit`")
# Variant -> what a reader calls it, in the order of the table.
NAMES = {
    "gpt2": "GPT-2",
    "gpt2 with a head of its own": "GPT-2, untied head",
    "gpt2 with silu": "GPT-2, activation silu",
    "gpt2 with scores scaled by layer": "GPT-2, scores scaled by layer",
    "llama with keys of every head": "Llama 1, Llama 2 7B and 13B",
    "llama": "Llama 2 70B, Llama 3 (grouped keys)",
    "llama 3.1": "Llama 3.1 to 3.3 (llama3 scaling)",
    "llama with biases of attention": "Llama, biases of attention",
    "llama with biases of the mlp": "Llama, biases of the MLP",
    "llama with yarn": "Llama, YaRN",
    "llama with yarn's mscale": "Llama, YaRN with mscale",
    "llama with linear scaling": "Llama, scaling linear, dynamic",
    "mistral": "Mistral 7B v0.1 (windows)",
    "mistral without windows": "Mistral from v0.2",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen2 with windows": "Qwen2, windows in all layers",
    "qwen2 with windows in some layers": "Qwen2, windows in some layers",
    "qwen3": "Qwen3",
    "qwen3 with windows": "Qwen3, windows in all layers",
    "qwen3 with windows in some layers": "Qwen3, windows in some layers",
    "t5": "T5 1.0 (tied, ReLU)",
    "t5 1.1": "T5 1.1, Flan-T5 (untied, gated)",
    "mt5": "mT5, umT5",
    "bert": "BERT",
    "bert with relative positions": "BERT, relative positions",
    "bert as a decoder": "BERT as a decoder",
    "roberta": "RoBERTa, DeBERTa and others",
    GLM: "GLM of 2021 (presets `glm-base`, `glm-large`)",
    "glm of other shapes": "GLM-4, ChatGLM",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 (text)",
    "phi": "Phi-1, Phi-1.5, Phi-2",
    "phi with norms of heads": "Phi, norms of heads",
    "phi3": "Phi-3 4k (windows)",
    "phi3 with a part of heads turned": "Phi-4-mini (part of heads turned)",
    "falcon-7b": "Falcon 7B",
    "falcon-40b": "Falcon 40B, 180B",
    "falcon with two norms in a row": "Falcon, attention and MLP in a row",
    "falcon-rw": "Falcon-RW (ALiBi)",
    "olmo": "OLMo",
    "olmo with clipped keys": "OLMo, clip_qkv",
    "olmo2": "OLMo 2",
    "bloom": "BLOOM",
    "bloom with the residual behind the norm": "BLOOM, residual behind the norm",
    "gpt_neox": "GPT-NeoX, Pythia",
    "gpt_neox in a row": "GPT-NeoX, attention and MLP in a row",
    "nemotron": "Nemotron",
    "mixtral": "Mixtral",
    "mixtral with windows": "Mixtral, windows in all layers",
    "mixtral with noise": "Mixtral, noise on the router's input",
    "qwen2-moe": "Qwen1.5-MoE, Qwen2-MoE",
    "qwen2-moe with dense layers": "Qwen2-MoE, dense first and every second layer",
    "qwen3-moe": "Qwen3-MoE",
    "qwen3-moe with a dense layer in between": "Qwen3-MoE, a dense layer in between",
    "olmoe": "OLMoE",
    "gpt-oss": "gpt-oss",
    "deepseek-v2": "DeepSeek-V2, V2.5",
    "deepseek-v2-lite": "DeepSeek-V2-Lite",
    "deepseek-v3": "DeepSeek-V3, R1",
    "deepseek-v3 with yarn": "DeepSeek-V3, YaRN with mscale",
    "deepseek-v3 with another router": "DeepSeek-V3, softmax scores",
    "kimi-k2": "Kimi K2",
    "llama with experts": "Llama with experts",
}
JOB: dict[str, Any] = {
    "cluster.nodes": 1,
    "cluster.gpus_per_node": 8,
    "cluster.device": "h100-sxm",
    "training.dtype": "bf16",
    "training.global_batch_size": 64,
}
OF_ANY_MODEL = ("deepspeed", "accelerate", "trl", "axolotl", "llama-factory", "automodel", "colossalai", "torch")
"""Launchers that are told the layout alone, or a model by its id."""


class Variant(NamedTuple):
    """The cells of a variant. refused: why it is not planned, empty if it is."""

    name: str
    kind: str
    refused: str = ""
    trains: str = ""
    weights: str = ""
    emitted: str = ""


def plan_of(kind: str, keys: dict[str, Any]) -> Plan:
    """The plan of a config on a node of GPUs. Raises InputError where it is refused."""
    with TemporaryDirectory() as folder:
        config = json.dumps({"model_type": kind, **keys})
        Path(folder, "config.json").write_text(config, "utf-8")
        plan = make_plan(load_job(None, {**JOB, "model.hf_config": folder}))
    plan.require_legal()
    return plan


def trains(plan: Plan) -> str:
    """`yes`, or the settings because of which it is planned and not launched."""
    reasons = [check.where.removeprefix("model.") for check in not_launched(plan.job)]
    return f"no: {', '.join(f'`{key}`' for key in reasons)}" if reasons else "yes"


def weights(kind: str, model: ModelSpec) -> str:
    """The class whose files are read and written; what of it is not."""
    try:
        scheme = get_scheme(model)
    except InputError:
        return "no"
    name = f"`{scheme.architecture}`"
    if scheme.model_type == kind:
        return name
    return f"{'read, ' if kind in builtin_schemes() else ''}written as {name}"


def emitted(plan: Plan) -> str:
    """The launchers that have words for the model, beside OF_ANY_MODEL."""
    names = [name for name in TARGETS if name not in OF_ANY_MODEL and _says(plan, name)]
    return ", ".join(names) or "layout alone"


def _says(plan: Plan, target: str) -> bool:
    try:
        emit_plan(plan, target)
    except InputError:
        return False
    return True


def variant(name: str) -> Variant:
    """What the code says of a variant."""
    if name == GLM:
        plan = make_plan(load_job(None, {**JOB, "model": "glm-base"}))
        return Variant(NAMES[name], "none", "", trains(plan), "no", emitted(plan))
    kind, keys = {**CONFIGS, **EXPERTS, **OTHERS, **REFUSED}[name]
    try:
        plan = plan_of(kind, keys)
    except InputError as error:
        message = re.sub(r"( in)? ?\S*config\.json:? ?", " ", error.issues[0].message).strip()
        return Variant(NAMES[name], f"`{kind}`", message)
    model = plan.job.model
    assert model is not None
    can = trains(plan)
    written = weights(kind, model) if can == "yes" else "no"
    return Variant(NAMES[name], f"`{kind}`", "", can, written, emitted(plan))


def table() -> str:
    """A row for each variant that is planned, or for several alike, then a line for each that is refused."""
    assert NAMES.keys() == {GLM, *CONFIGS, *EXPERTS, *OTHERS, *REFUSED}
    variants = [variant(name) for name in NAMES]
    rows = [HEAD, ("---",) * len(HEAD)]
    planned = groupby((one for one in variants if not one.refused), lambda one: one[1:])
    rows += [("; ".join(one.name for one in alike), *cells[:1], *cells[2:]) for cells, alike in planned]
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    lines += ["", "Refused:", ""]
    lines += [f"- {one.name} ({one.kind}): {one.refused}" for one in variants if one.refused]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with the table of today."""
    whole = f"{START}\n{table()}\n{END}"
    return re.sub(f"{START}.*?{END}", lambda _: whole, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
