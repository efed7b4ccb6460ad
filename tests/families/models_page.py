"""The table of docs/models.md: which configs of Hugging Face plan, launch and have weights.

`python -m tests.families.models_page` writes it anew.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mpctl.rules.launched import not_launched
from mpctl.spec.hf import config_readers
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from mpctl.weights.names import builtin_schemes
from tests.families.hf_configs import CONFIGS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
START, END = "<!-- table: python -m tests.families.models_page -->\n", "<!-- end -->"
OTHERS: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 64, "vocab_size": 384, "max_position_embeddings": 16},
    "t5": {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 64, "vocab_size": 384},
}  # fmt: skip
NAMES = {
    "llama": "Llama 1 to 3", "mistral": "Mistral", "qwen2": "Qwen2, Qwen2.5", "qwen3": "Qwen3",
    "gemma": "Gemma", "gemma2": "Gemma 2", "gemma3_text": "Gemma 3 (text)",
    "phi": "Phi-1, Phi-1.5, Phi-2", "phi3": "Phi-3", "falcon": "Falcon", "olmo": "OLMo",
    "olmo2": "OLMo 2", "bloom": "BLOOM", "gpt_neox": "GPT-NeoX, Pythia", "nemotron": "Nemotron",
    "gpt2": "GPT-2", "bert": "BERT", "t5": "T5, T5 1.1",
}  # fmt: skip


def launches(kind: str, keys: dict[str, Any]) -> str:
    """`yes`, or the settings because of which a config is planned and not launched."""
    with TemporaryDirectory() as folder:
        config = json.dumps({"model_type": kind, **keys})
        Path(folder, "config.json").write_text(config, "utf-8")
        model = load_job(None, {"model.hf_config": folder}).model
    reasons = [check.where.removeprefix("model.") for check in not_launched(JobSpec(model=model))]
    return f"no: {', '.join(f'`{key}`' for key in reasons)}" if reasons else "yes"


def table() -> str:
    """The table, a row for each model_type that is read."""
    shapes = dict(reversed(CONFIGS.values())) | OTHERS
    schemes = builtin_schemes()
    lines = ["| models | `model_type` | plans | launches | weights |", "|---|---|---|---|---|"]
    for kind in sorted(config_readers(), key=lambda kind: NAMES[kind]):
        weights = f"`{schemes[kind].architecture}`" if kind in schemes else "no"
        cells = (NAMES[kind], f"`{kind}`", "yes", launches(kind, shapes[kind]), weights)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with the table of today."""
    whole = f"{START}\n{table()}\n{END}"
    return re.sub(f"{START}.*?{END}", lambda _: whole, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
