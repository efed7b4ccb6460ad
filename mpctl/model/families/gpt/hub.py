"""Every decoder of Hugging Face's transformers that GPT reads and writes, dense or with experts."""

from __future__ import annotations

from mpctl.model.families.gpt import hub_dense, hub_experts

READERS = {**hub_dense.READERS, **hub_experts.READERS}
SCHEMES = {
    "learned": (hub_dense.GPT2,),
    "rotary": (hub_dense.LLAMA, hub_dense.MISTRAL, hub_dense.QWEN2, hub_dense.QWEN3, *hub_experts.CLASSES),
}
