"""Adapters in PEFT's words, as TRL, Axolotl and LLaMA-Factory take them.

Spelling and meanings: peft 0.21, tuners/lora/config.py. alpha is an integer, with 2 x rank of
a job that names none. Targets are names of modules or `all-linear`; a job's groups attention and mlp are
the modules of Llama's form.

>>> target_names(["attention"], is_latent=False)
['q_proj', 'k_proj', 'v_proj', 'o_proj']
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from mpctl.core.errors import Issue
from mpctl.interop.limits import refused
from mpctl.interop.mapping import ForeignKey, KeyReader
from mpctl.spec.adapter import AdapterSpec
from mpctl.spec.job import JobSpec

ADAPTER, ALL = "training.adapter.", "all-linear"
KINDS, BASES = ("lora", "qlora", "dora"), ("nf4", "int8", "bf16", "fp16", "fp32")
"""Adapters, and types of frozen weights, that these launchers have."""
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
DEFAULT_TARGETS = {
    **dict.fromkeys(("bloom", "falcon", "pythia", "neox"), ("query_key_value",)),
    "gpt2": ("c_attn",),
    "phi-2": ("q_proj", "v_proj", "fc1", "fc2"),
    "": ("q_proj", "v_proj"),
}
"""The targets of PEFT where none are named, by a part of the model's name: utils/constants.py, which has them by
model_type, q_proj and v_proj for Llama, Mistral, Mixtral, Gemma, Qwen 2 and 3."""
LATENT = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def adapter_rows(
    *, rank: str, dropout: str, dora: str, rslora: str, default: Mapping[str, int | float]
) -> tuple[ForeignKey, ...]:
    """Rows of an adapter's keys, by the launcher's names and defaults of `rank`, `alpha`, `dropout`."""
    return (
        ForeignKey(rank, f"{ADAPTER}rank", int, default["rank"]),
        ForeignKey("lora_alpha", f"{ADAPTER}alpha", int, default.get("alpha"), value=alpha_of),
        ForeignKey(dropout, f"{ADAPTER}dropout", float, default.get("dropout", 0.0)),
        ForeignKey(rslora, f"{ADAPTER}rslora", bool, False),
        ForeignKey(dora, value=lambda job: job.training.adapter.kind == "dora" if job.training.adapter else None),
    )


def alpha_of(job: JobSpec) -> int | None:
    """alpha as an integer."""
    adapter = job.training.adapter
    return None if adapter is None else round(2 * adapter.rank if adapter.alpha is None else adapter.alpha)


def targets_of(job: JobSpec) -> list[str] | None:
    """The names of the adapted modules; None for every linear one."""
    adapter = job.training.adapter
    if adapter is None or ALL in adapter.targets:
        return None
    return target_names(adapter.targets, is_latent=job.model is not None and job.model.is_mla)


def target_names(targets: Iterable[str], *, is_latent: bool) -> list[str]:
    """Targets with the groups as names of modules."""
    groups = {"attention": LATENT if is_latent else ATTENTION, "mlp": MLP}
    return list(dict.fromkeys(name for target in targets for name in groups.get(target, (target,))))


def saved_of(job: JobSpec) -> list[str] | None:
    """Modules trained in full; None where there are none."""
    return (job.training.adapter.modules_to_save if job.training.adapter else None) or None


def stored_as(job: JobSpec) -> str | None:
    """The data type of the frozen weights of a job with adapters, where it is not training.dtype."""
    return job.training.adapter.stored_as if job.training.adapter else None


def is_nested(job: JobSpec) -> bool | None:
    """Whether the scales of nf4 are in 8 bits; None over another base."""
    adapter = job.training.adapter
    return adapter.double_quantization if adapter and adapter.stored_as == "nf4" else None


def peft_refusals(job: JobSpec, who: str, *, dtypes: bool) -> Iterator[Issue]:
    """Issues of adapters that PEFT has no words for. dtypes: whether the frozen weights may be read in another
    16- or 32-bit type than training.dtype."""
    adapter = job.training.adapter
    if adapter is None:
        return
    if adapter.alpha is not None and not float(adapter.alpha).is_integer():
        yield refused("training.adapter.alpha", adapter.alpha, f"{who} takes an integer", f"use {round(adapter.alpha)}")
    base, dtype = adapter.stored_as, job.training.dtype
    if base in ("bf16", "fp16", "fp32") and base != dtype and not dtypes:
        message, hint = f"{who} reads a model in the type that it trains in, {dtype}", f"use {dtype}, or leave it out"
        yield refused("training.adapter.base_precision", base, message, hint)
    yield from _target_refusals(job, adapter, who)


def _target_refusals(job: JobSpec, adapter: AdapterSpec, who: str) -> Iterator[Issue]:
    groups = [name for name in adapter.targets if name in ("attention", "mlp")]
    if groups and job.model is not None and job.model.position != "rotary":
        message, hint = f"{who} takes names of modules", "name them, as in training.adapter.targets=[c_attn, c_fc]"
        yield refused("training.adapter.targets", groups[0], message, hint)
    if dotted := [name for name in adapter.targets if "." in name]:
        message, hint = f"{who} takes names of Hugging Face's modules", "use all-linear, or names such as q_proj"
        yield refused("training.adapter.targets", dotted[0], message, hint)


def read_base(reader: KeyReader, *, in_4_bits: bool, in_8_bits: bool, dora: bool, nested: bool, quant: str) -> None:
    """Set the kind of adapter and the precision below it. quant: of the 4 bits, nf4 or fp4, by the key of that name."""
    s = reader.settings
    s[f"{ADAPTER}kind"] = "dora" if dora else "qlora" if in_4_bits else "lora"
    if in_4_bits:
        s |= {f"{ADAPTER}base_precision": "nf4", f"{ADAPTER}double_quantization": nested}
        if reader.value(quant, "nf4") != "nf4":
            reader.nearest(quant, f"{reader.value(quant)}: planned as nf4, of the same bits")
    elif in_8_bits:
        s[f"{ADAPTER}base_precision"] = "int8"


def read_default_targets(reader: KeyReader, key: str, model: str) -> None:
    """Set the targets of PEFT where `key` names none. model: its name, as far as it is known."""
    if reader.has(key):
        return
    found = next(names for part, names in DEFAULT_TARGETS.items() if part in model.lower())
    reader.settings[f"{ADAPTER}targets"] = list(found)
    message = f"is absent: planned as {', '.join(found)}, PEFT's default by the model's type"
    reader.nearest(key, message, "name the modules, or all-linear")


def read_names(reader: KeyReader, key: str, setting: str, every: tuple[str, ...] = ()) -> None:
    """Set names of modules, a list or a text with commas. every: words for all linear modules."""
    names = [name.strip() for words in reader.flags.get(key, ()) for name in words.split(",") if name.strip()]
    if names:
        reader.settings[f"{ADAPTER}{setting}"] = [ALL if name in every else name for name in names]
