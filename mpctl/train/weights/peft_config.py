"""adapter_config.json of Hugging Face's peft (0.21), read and written; no torch.

What changes the function and has no setting of ours is refused by its key; what only says how training went on, such
as the initialisation of A, is not read. `rank_pattern` and `alpha_pattern` give modules a rank and an alpha of their
own: the first key that matches a module's path holds, as in peft.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpctl.core.errors import InputError, Issue
from mpctl.spec.adapter import AdapterSpec

CONFIG, TENSORS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
NEUTRAL = {
    "auto_mapping",
    "arrow_config",
    "base_model_class",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "parent_library",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "target_parameters",
    "task_type",
}
"""Keys that do not change what the tensors of the file compute."""
READ = {
    "alpha_pattern",
    "base_model_name_or_path",
    "bias",
    "init_lora_weights",
    "lora_alpha",
    "lora_dropout",
    "modules_to_save",
    "peft_type",
    "r",
    "rank_pattern",
    "use_dora",
    "use_rslora",
}
CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga", "milora")
"""Initialisations that subtract the adapters' initial product from the base."""


@dataclass(frozen=True)
class PeftConfig:
    """What adapter_config.json says of the function. rank, alpha: of modules that no pattern matches; base: where it
    says that the base is, a folder or a name, empty where it does not; saved: modules_to_save."""

    path: Path
    rank: int
    alpha: float
    rslora: bool
    dora: bool
    dropout: float
    base: str
    saved: tuple[str, ...]
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def scale_of(self, target: str, rank: int) -> float:
        """The factor of BA in a module. rank: that of its tensors."""
        alpha = float(_matching(self.alphas, target, self.alpha))
        return alpha / (rank**0.5 if self.rslora else rank)

    def rank_of(self, target: str) -> int:
        """The rank that it gives a module."""
        return int(_matching(self.ranks, target, self.rank))


def _matching(pattern: Mapping[str, Any], target: str, default: Any) -> Any:
    keys = (key for key in pattern if re.match(rf"(.*\.)?({key})$", target))
    return pattern.get(next(keys, ""), default)


def read_config(folder: Path) -> PeftConfig:
    """The config of a folder that peft or mpctl wrote. InputError has all that mpctl cannot express."""
    path = folder / CONFIG
    try:
        raw: Any = json.loads(path.read_text("utf-8"))
        if not isinstance(raw, dict):
            raise ValueError("is no table")
    except (OSError, ValueError, RecursionError) as error:
        hint = f"name a folder with {CONFIG} and {TENSORS}, as peft's save_pretrained writes"
        raise InputError.of("no-adapter", str(path), f"cannot be read: {error}", hint) from None
    if issues := list(_refusals(path, raw)):
        raise InputError(issues)
    try:
        return PeftConfig(
            path,
            _positive(raw, "r", 8),
            float(raw.get("lora_alpha", 8)),
            bool(raw.get("use_rslora")),
            bool(raw.get("use_dora")),
            float(raw.get("lora_dropout") or 0.0),
            str(raw.get("base_model_name_or_path") or ""),
            tuple(map(str, raw.get("modules_to_save") or ())),
            {_pattern(key): _positive(raw["rank_pattern"], key) for key in raw.get("rank_pattern") or {}},
            {_pattern(key): float(value) for key, value in (raw.get("alpha_pattern") or {}).items()},
        )
    except (TypeError, ValueError, AttributeError, re.error) as error:
        raise InputError.of("adapter-config", str(path), str(error), "save the adapter again with peft") from None


def _positive(table: Mapping[str, Any], key: str, default: int = 0) -> int:
    value = table.get(key, default)
    if type(value) is not int or not 1 <= value <= 2**16:
        raise ValueError(f"{key} is {value!r:.40}, not a rank of 1 to {2**16}")
    return value


def _pattern(key: str) -> str:
    """A key of a pattern, which must not be one whose matching takes forever."""
    if not re.fullmatch(r"[\w.\\*^]{1,200}", key) or key.count("*") > 2:
        raise ValueError(f"the pattern {key!r:.60} is not a path of modules")
    return key


def _refusals(path: Path, raw: Mapping[str, Any]) -> Iterator[Issue]:
    merge = "merge it with peft, merge_and_unload(), and start from the merged weights"
    if (kind := raw.get("peft_type", "LORA")) != "LORA":
        yield Issue("adapter-unsupported", str(path), f"peft_type is {kind!r:.40}, mpctl has LORA alone", merge)
    if (bias := raw.get("bias", "none")) != "none":
        yield Issue("adapter-unsupported", str(path), f"bias is {bias!r:.40}: biases of the base were trained", merge)
    init = raw.get("init_lora_weights", True)
    if isinstance(init, str) and init.startswith(CHANGES_BASE):
        message = f"init_lora_weights is {init!r:.40}, which changes the base's weights"
        hint = "save it with path_initial_model_for_weight_conversion, which makes it an adapter of the original base"
        yield Issue("adapter-unsupported", str(path), message, hint)
    for key in sorted(raw.keys() - NEUTRAL - READ):
        if raw[key]:
            message = f"{key} is {raw[key]!r:.60}, which mpctl has no setting for"
            yield Issue("adapter-unsupported", str(path), message, merge)


def config_document(
    spec: AdapterSpec,
    ranks: Mapping[str, int],
    *,
    base: str,
    parameters: tuple[str, ...],
    others: tuple[str, ...],
    task: str | None,
    conv1d: bool,
) -> dict[str, Any]:
    """adapter_config.json of adapters of ours.

    ranks: of each module that has one, by its path; fused modules have a multiple of the spec's. parameters: paths of
    those that are parameters of fused experts; others: paths of all linear modules without an adapter.
    """
    counts: dict[int, int] = {}
    for rank in ranks.values():
        counts[rank] = counts.get(rank, 0) + 1
    usual = max(counts, key=lambda rank: (counts[rank], -rank))
    modules = [target for target in ranks if target not in parameters]
    odd = {rank: [t for t in ranks if ranks[t] == rank] for rank in counts if rank != usual}
    rank_pattern = {name: rank for rank, ts in odd.items() for name in suffixes(ts, [*(ranks.keys() - set(ts))])}
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "r": usual,
        "lora_alpha": _alpha(spec, usual),
        "lora_dropout": 0.0 if parameters else spec.dropout,
        "use_rslora": spec.rslora,
        "use_dora": spec.kind == "dora",
        "target_modules": suffixes(modules, others),
        "target_parameters": suffixes(list(parameters), []) or None,
        "modules_to_save": spec.modules_to_save or None,
        "rank_pattern": rank_pattern,
        "alpha_pattern": {name: _alpha(spec, rank) for name, rank in rank_pattern.items()},
        "bias": "none",
        "fan_in_fan_out": conv1d,
        "init_lora_weights": True,
        "inference_mode": True,
        "layers_to_transform": None,
        "layers_pattern": None,
    }


def _alpha(spec: AdapterSpec, rank: int) -> float:
    """The alpha with which a module of this rank has the spec's factor."""
    alpha = spec.scale * (rank**0.5 if spec.rslora else rank)
    return round(alpha) if abs(alpha - round(alpha)) < 1e-9 * alpha else alpha


def suffixes(wanted: list[str], others: list[str] | tuple[str, ...]) -> list[str]:
    """The shortest ends of paths that the wanted have and no other has; a path where there is none.

    >>> suffixes(["h.0.mlp.c_proj", "h.1.mlp.c_proj"], ["h.0.attn.c_proj"])
    ['mlp.c_proj']
    """
    taken = {end for path in others for end in _ends(path)}
    found = (next((end for end in _ends(path) if end not in taken), path) for path in wanted)
    return sorted(set(found))


def _ends(path: str) -> Iterator[str]:
    parts = path.split(".")
    yield from (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
