"""Optimizers of Megatron-Core in its words: Muon, states in fewer bits, states in host memory; written and read.

Names and defaults: megatron-core 0.19.2, optimizer/optimizer_config.py and training/arguments.py. Narrower states and
states in host memory are of the precision-aware optimizer, which needs the distributed one. Those in host memory are
all in fp32: HybridDeviceOptimizer is given no data type of moments. `--main-params-dtype fp16` has no setting of a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from mpctl.core.errors import Issue
from mpctl.interop.config_text import Source, Value
from mpctl.interop.limits import refused
from mpctl.interop.mapping import ForeignKey, KeyReader
from mpctl.model.layout.topology import zero_copies
from mpctl.plan.estimate.states import gradient_width
from mpctl.spec.base import DType
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import job_profile

OPTIMIZER, AWARE, OFFLOAD = "--optimizer", "--use-precision-aware-optimizer", "--optimizer-cpu-offload"
FRACTION, OVERLAP, SPLIT = "--optimizer-offload-fraction", "--overlap-cpu-optimizer-d2h-h2d", "--muon-no-split-qkv"
AVERAGE, SQUARE, GRADIENTS = "--exp-avg-dtype", "--exp-avg-sq-dtype", "--main-grads-dtype"
NAMES = {"adamw": "adam", "muon": "muon"}
MASTERS = "--main-params-dtype"
TORCH = {"fp8": "uint8", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""Data types of states in torch's names, the narrowest first."""


BRIDGE_DEFAULTS: dict[str, float | str] = {"--muon-momentum": 0.95, "--muon-tp-mode": "duplicated"}
"""Defaults of OptimizerConfig that are not those of Megatron-LM's parser."""


def _of_muon(key: str) -> Callable[[JobSpec], Value]:
    return lambda job: getattr(job.training.muon, key) if job.training.optimizer == "muon" else None


def _is_aware(job: JobSpec) -> bool:
    """Whether the precision-aware optimizer is needed."""
    return job.training.optimizer == "adamw" and (job.training.optimizer_dtype is not None or _offloads(job))


def _offloads(job: JobSpec) -> bool:
    return job.training.offload_optimizer


def gradients_of(job: JobSpec) -> DType:
    """The data type of gradients that a plan counts: the job's, or its runtime's (bf16 under Megatron-Core's fp8)."""
    t, memory = job.training, job_profile(job.training).memory
    is_given = t.gradient_dtype is not None or memory.gradients_unknown
    if is_given or gradient_width(t, memory) >= 4:
        return t.reduced_dtype
    return "fp16" if t.dtype == "fp16" else "bf16"


def _moments(job: JobSpec) -> Value:
    return job.training.optimizer_dtype if _is_aware(job) else None


def _main_gradients(job: JobSpec) -> Value:
    return "bf16" if job.training.optimizer_dtype and gradients_of(job) == "bf16" else None


MUON_FLAGS = (
    ForeignKey("--muon-momentum", "training.muon.momentum", float, 0.9, value=_of_muon("momentum")),
    ForeignKey("--muon-nesterov", "training.muon.nesterov", bool, False, value=_of_muon("nesterov")),
    ForeignKey("--muon-num-ns-steps", "training.muon.steps", int, 5, value=_of_muon("steps")),
    ForeignKey(
        "--muon-coefficient-type",
        "training.muon.coefficients",
        str,
        "quintic",
        {"quintic": "quintic", "polar_express": "polar_express"},
        value=_of_muon("coefficients"),
    ),
    ForeignKey(
        "--muon-scale-mode",
        "training.muon.scale_mode",
        str,
        "spectral",
        {mode: mode for mode in ("spectral", "unit_rms_norm", "shape_scaling")},
        value=_of_muon("scale_mode"),
    ),
    ForeignKey("--muon-extra-scale-factor", "training.muon.extra_scale", float, 1.0, value=_of_muon("extra_scale")),
    ForeignKey(
        "--muon-tp-mode",
        "training.muon.tp_mode",
        str,
        "blockwise",
        {mode: mode for mode in ("duplicated", "distributed", "blockwise")},
        value=_of_muon("tp_mode"),
    ),
)
OPTIMIZER_FLAGS = (
    ForeignKey(OPTIMIZER, value=lambda job: "muon" if job.training.optimizer == "muon" else None),
    *MUON_FLAGS,
    ForeignKey(SPLIT, value=lambda job: job.training.optimizer == "muon" and not job.training.muon.split_qkv),
    ForeignKey(AWARE, value=_is_aware),
    ForeignKey(AVERAGE, value=_moments),
    ForeignKey(SQUARE, value=_moments),
    ForeignKey(GRADIENTS, value=_main_gradients),
    ForeignKey(MASTERS),
    ForeignKey(OFFLOAD, value=_offloads),
    ForeignKey(FRACTION, value=lambda job: job.training.offload_fraction if _offloads(job) else None),
    ForeignKey(OVERLAP, value=lambda job: _offloads(job) and job.training.offload_overlap),
)


def optimizer_fields(job: JobSpec) -> Iterator[tuple[str, Value]]:
    """The fields of Megatron-Bridge's `optimizer` that say the same."""
    t = job.training
    yield "optimizer", NAMES.get(t.optimizer, "adam")
    if t.optimizer == "muon":
        yield from ((BRIDGE[row.setting], row.of(job)) for row in MUON_FLAGS)
        yield "muon_split_qkv", t.muon.split_qkv
    if _is_aware(job):
        yield "use_precision_aware_optimizer", True
    for flag, name in ((AVERAGE, _moments(job)), (SQUARE, _moments(job)), (GRADIENTS, _main_gradients(job))):
        if name is not None:
            yield BRIDGE_STATES[flag], Source(f"torch.{TORCH[str(name)]}")
    if _offloads(job):
        yield "optimizer_cpu_offload", True
        yield "optimizer_offload_fraction", t.offload_fraction
        yield "overlap_cpu_optimizer_d2h_h2d", t.offload_overlap


BRIDGE_STATES = {flag: flag.removeprefix("--").replace("-", "_") for flag in (AVERAGE, SQUARE, GRADIENTS, MASTERS)}
"""Names of Megatron-Bridge's fields of data types, by flag."""
BRIDGE = {row.setting: row.key.removeprefix("--").replace("-", "_") for row in MUON_FLAGS}
"""Names of Megatron-Bridge's fields, by setting."""
BRIDGE_ROWS = tuple(
    ForeignKey(f"optimizer.{BRIDGE[row.setting]}", row.setting, row.kind, default, row.words)
    for row in MUON_FLAGS
    for default in (BRIDGE_DEFAULTS.get(row.key, row.default),)
)


def _dtype(reader: KeyReader, key: str) -> str:
    """A data type of states, by torch's name too."""
    text = reader.value(key, "fp32").removeprefix("torch.")
    return next((ours for ours, theirs in TORCH.items() if theirs == text), text)


def require_aware(reader: KeyReader, aware: str, keys: Iterable[str], *, is_on: bool) -> None:
    """Refuse narrower states, and states in host memory, without the precision-aware optimizer."""
    for key in () if is_on else keys:
        if reader.has(key) and _dtype(reader, key) != "fp32":
            reader.wrong(key, f"{reader.value(key) or 'it'} needs {aware}, which is missing", f"add {aware}")


def read_states(reader: KeyReader, keys: Mapping[str, str], *, on_host: bool) -> None:
    """Set the data types of the precision-aware optimizer's states. keys: the reader's, by Megatron's flag. on_host:
    whether the optimizer offloads its states, which are then fp32."""
    s, found = reader.settings, [_dtype(reader, keys[flag]) for flag in (AVERAGE, SQUARE)]
    if unknown := [text for text in found if text not in TORCH]:
        reader.wrong(keys[AVERAGE], f"{unknown[0]!r} is no data type of moments", "use fp32, fp16, bf16 or fp8")
        return
    widest = max(found, key=list(TORCH).index)
    if on_host:
        for flag, text in zip((AVERAGE, SQUARE), found, strict=True):
            if text != "fp32":
                reader.nearest(keys[flag], f"{text} is planned as fp32, in which the optimizer on the host keeps it")
    else:
        s["training.optimizer_dtype"] = widest
        if found[0] != found[1]:
            reader.nearest(keys[SQUARE], f"{found[1]} beside {keys[AVERAGE]} {found[0]} is planned as {widest}")
    if _dtype(reader, keys[GRADIENTS]) == "bf16":
        s["training.gradient_dtype"] = "bf16"
    if _dtype(reader, keys[MASTERS]) != "fp32":
        reader.nearest(keys[MASTERS], "is planned as fp32")


def read_optimizer(reader: KeyReader) -> None:
    """Set the optimizer, the data types of its states and their place."""
    s, name = reader.settings, reader.value(OPTIMIZER, "adam")
    if name not in NAMES.values():
        reader.wrong(OPTIMIZER, f"{name!r} is not planned", "use adam or muon")
    if name == "muon":
        s["training.optimizer"] = "muon"
        reader.read(MUON_FLAGS)
        s["training.muon.split_qkv"] = not reader.has(SPLIT)
    require_aware(reader, AWARE, (AVERAGE, SQUARE, GRADIENTS, OFFLOAD), is_on=reader.has(AWARE))
    if not reader.has(AWARE):
        return
    read_states(reader, {flag: flag for flag in BRIDGE_STATES}, on_host=reader.has(OFFLOAD))
    if reader.has(OFFLOAD):
        s["training.offload_optimizer"] = True
        s["training.offload_fraction"] = reader.number(FRACTION, float, 1.0)
        s["training.offload_overlap"] = reader.has(OVERLAP)


def optimizer_refusals(job: JobSpec, who: str) -> Iterator[Issue]:
    """Issues of an optimizer that Megatron-Core does not have in this layout; who: the launcher."""
    t, zero = job.training, job.parallel.zero
    if _is_aware(job) and zero == 0:
        key = "offload_optimizer" if _offloads(job) else "optimizer_dtype"
        message = f"{who} has it in the distributed optimizer, which is ZeRO 1"
        yield refused(f"training.{key}", getattr(t, key), message, "use zero 1")
    if _is_aware(job) and _offloads(job) and t.optimizer_dtype not in (None, "fp32"):
        message = f"{who} keeps offloaded moments in fp32"
        yield refused("training.optimizer_dtype", t.optimizer_dtype, message, "leave it out, or offload_optimizer")
    if t.optimizer == "muon" and (zero > 1 or zero_copies(job) > 1):
        key, value = ("zero", zero) if zero > 1 else ("zero_size", job.parallel.zero_size)
        message = f"{who} deals complete matrices to all of dp x cp, as its ZeRO 1"
        yield refused(f"parallel.{key}", value, message, "use zero 0 or 1 without zero_size, or optimizer adamw")
