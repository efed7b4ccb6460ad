"""Megatron-LM's flags that change the layout or the model and that no setting of a job says.

They are refused by name, or by a word in their name: a plan that left them out would be of another
model. A flag whose value says nothing (one expert-parallel rank) is as if it were not there.

By hand, `--num-experts 8` is refused; `--log-interval` is not. A name that is none of Megatron-LM's
(megatron_names.txt) may be a misspelt flag of the layout: `--sequence-parralel` is refused as well.
"""

from __future__ import annotations

import re
from importlib.resources import files

from mpctl.errors import Issue

NEUTRAL = {
    "--expert-model-parallel-size": ("1",), "--expert-tensor-parallel-size": ("1",),
    "--tensor-parallel-num-weight-shards": ("1",),
    "--num-distributed-optimizer-instances": ("1",),
    "--cpu-offloading-num-layers": ("0",), "--optimizer": ("adam",), "--cp-comm-type": ("p2p",),
    "--vocab-extra-ids": ("0",),
}  # fmt: skip
_LAYOUT = re.compile(r"parallel|pipeline|virtual|fsdp|sharding|sharded|expert|moe|shard-")
_HARMLESS = {
    "--no-overlap-p2p-communication", "--overlap-p2p-communication-warmup-flush",
    "--pipeline-model-parallel-comm-backend", "--microbatch-group-size-per-virtual-pipeline-stage",
    "--dist-ckpt-format", "--ckpt-fully-parallel-save", "--ckpt-fully-parallel-load",
    "--no-ckpt-fully-parallel-save", "--ckpt-assume-constant-structure", "--fsdp-double-buffer",
    "--fsdp-manual-registration", "--tp-comm-overlap", "--dist-ckpt-save-pre-mcore-014",
    "--no-data-sharding",
}  # fmt: skip
_SHAPE = {
    "--num-experts", "--multi-latent-attention", 
    "--quick-geglu", "--openai-gelu", "--qk-l2-norm", 
    "--apply-residual-connection-post-layernorm", "--hybrid-layer-pattern",
    "--hybrid-override-pattern", "--is-hybrid-model", "--spec",
    "--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json",
    "--experimental-attention-variant", "--linear-attention-freq", "--yaml-cfg",
    "--encoder-num-layers", "--decoder-num-layers", "--encoder-seq-length", "--decoder-seq-length",
    "--padded-vocab-size", "--no-pad-vocab-size", "--attention-output-gate", "--use-mup",
    "--step-batch-size-schedule", "--optimizer", "--cpu-offloading-num-layers",
    "--fine-grained-activation-offloading", "--freeze-all-layers",
    "--fp32-residual-connection", "--num-distributed-optimizer-instances", "--cp-comm-type",
    "--vocab-extra-ids", "--disable-pad-vocab-size", "--no-position-embedding", "--no-rope-freq",
    "--mrope-section",
}  # fmt: skip
ALL_NAMED = frozenset(_SHAPE | _HARMLESS | NEUTRAL.keys())


def neutral(flag: str, values: tuple[str, ...]) -> bool:
    """Whether a flag with these values says what is so without it."""
    return flag in NEUTRAL and values == NEUTRAL[flag]


def megatron_names() -> list[str]:
    """All flags of Megatron-LM's parser, of megatron-core 0.19.2, in the order of their names."""
    return files("mpctl.interop").joinpath("megatron_names.txt").read_text("utf-8").split()


def misspelt(flag: str) -> Issue | None:
    """The issue of a flag that Megatron-LM does not have, with the nearest that it has."""
    if flag in (names := megatron_names()):
        return None
    import difflib  # only where something is wrong

    near = difflib.get_close_matches(flag, names, n=1, cutoff=0.75)
    hint = f"did you mean {near[0]}?" if near else "leave it out to plan without it"
    return Issue("megatron-flag", flag, "is no flag of Megatron-LM (megatron-core 0.19.2)", hint)


def refusal_of(flag: str, values: tuple[str, ...]) -> Issue | None:
    """The issue of a flag that is not read, if it is none of Megatron-LM's or changes the layout or
    the model's shape; None of others."""
    if wrong := misspelt(flag):
        return wrong
    if neutral(flag, values) or flag in _HARMLESS:
        return None
    if flag not in _SHAPE and not _LAYOUT.search(flag):
        return None
    what = "the layout" if _LAYOUT.search(flag) else "the model or its training"
    message = f"{' '.join(values)}: changes {what}, and no setting of a job says it".lstrip(": ")
    return Issue("megatron-flag", flag, message, "leave it out to plan without it")
