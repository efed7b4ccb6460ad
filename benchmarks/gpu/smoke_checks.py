"""The checks of smoke.py, and the process that makes them: `python -m benchmarks.gpu.smoke_checks
DEVICE NAME ..` prints a line of JSON for each, and on stderr the traceback of one that fails.

A check is a function of a device, `cuda` or `cpu`, that returns what it found, in words. It raises
Skipped for what the device has not, anything else where something is wrong. torch is imported in
the checks, so that those of the machine answer without it.

Kernels are held to float64: the same numbers, rounded to the kernel's type first, through torch's
own operations on a CPU. An error is that of the worst element, over the largest one.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mpctl.train.kernels.backend import KernelBackend

ROOT = Path(__file__).parents[2]
CLOSE = {"float32": 2e-5, "bfloat16": 2**-6}


class Skipped(Exception):
    """The device does not have what would be checked; says why."""


Check = Callable[["torch.device"], str]


@dataclass(frozen=True)
class Limited:
    """A check, and the seconds that it may take."""

    run: Check
    seconds: float


CHECKS: dict[str, Limited] = {}


def check(name: str, seconds: float) -> Callable[[Check], Check]:
    """Add a function to CHECKS."""

    def added(run: Check) -> Check:
        CHECKS[name] = Limited(run, seconds)
        return run

    return added


# ---------------------------------------------------------------- the machine


@check("compiler", 5)
def compiler(device: Any) -> str:
    """Triton builds its launcher in C when a kernel is first launched."""
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if found is None or not header.is_file():
        lacks = "no cc, gcc or clang" if found is None else f"no {header}"
        raise RuntimeError(f"{lacks}: Triton cannot build its launcher, all kernels are torch's")
    return f"{found}, {header}"


@check("packages", 5)
def packages(device: Any) -> str:
    """Everything that mpctl imports is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    missing = []
    for need in project["dependencies"]:
        name = need.partition(">")[0]
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(need)
    if missing:
        raise RuntimeError(f"missing: {', '.join(missing)} (benchmarks/gpu/wheels.sh)")
    return f"all {len(project['dependencies'])} of pyproject.toml"


@check("versions", 60)
def versions(device: torch.device) -> str:
    """Of what the figures depend on."""
    import torch

    found = {"Python": platform.python_version(), "torch": torch.__version__}
    try:
        found["Triton"] = metadata.version("triton")
    except metadata.PackageNotFoundError:
        found["Triton"] = "missing"
    if device.type == "cuda":
        driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        done = subprocess.run(driver, capture_output=True, text=True, timeout=20, check=False)
        nccl: Any = torch.cuda.nccl.version()
        found |= {
            "driver": done.stdout.strip() or "unknown",
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
            "NCCL": ".".join(map(str, nccl)),
            "device": torch.cuda.get_device_name(device),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        }
    return ", ".join(f"{name} {text}" for name, text in found.items())


# ---------------------------------------------------------------- kernels


def kernels_of(device: torch.device) -> KernelBackend:
    """Triton's kernels, interpreted on a CPU. Raises what keeps them from running."""
    from mpctl.train.kernels.triton.backend import TritonKernels, fused_kernels

    if device.type == "cuda":
        return fused_kernels(device)
    if "TRITON_INTERPRET" not in os.environ:
        raise Skipped("triton is not installed")
    return TritonKernels()


@check("triton", 60)
def triton(device: torch.device) -> str:
    """A first launch of attention with dropout, which compiles and builds the launcher."""
    kernels_of(device)
    return "compiled and launched" if device.type == "cuda" else "interpreted"


def drawn(*shape: int, seed: int = 1) -> Tensor:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def held_to_float64(
    device: torch.device,
    operation: Callable[..., Any],
    inputs: Sequence[Tensor],
    dtype: str,
    reference: Callable[..., Any] | None = None,
) -> str:
    """Compare results and gradients of operation(kernels, device, *inputs) on the device with those
    of the same, or of `reference`, in float64 by torch's kernels on a CPU."""
    import torch

    from mpctl.train.kernels.backend import TORCH_BACKEND

    rounded = [x.to(getattr(torch, dtype)) for x in inputs]
    cpu = torch.device("cpu")
    found = _with_gradients(operation, kernels_of(device), device, [x.to(device) for x in rounded])
    exact = _with_gradients(reference or operation, TORCH_BACKEND, cpu, [x.double() for x in rounded])
    worst = max(
        float((here.double().cpu() - there).abs().max() / there.abs().max().clamp(min=1e-30))
        for here, there in zip(found, exact, strict=True)
    )
    if not worst <= CLOSE[dtype]:
        raise RuntimeError(f"{dtype}: the largest error is {worst:.1e}, allowed {CLOSE[dtype]:.1e}")
    return f"{dtype} {worst:.0e}"


def _with_gradients(
    operation: Callable[..., Any], kernels: KernelBackend, device: torch.device, inputs: Sequence[Tensor]
) -> list[Tensor]:
    import torch

    leaves = [x.detach().requires_grad_() for x in inputs]
    made = operation(kernels, device, *leaves)
    results = [made] if isinstance(made, torch.Tensor) else list(made)
    total = sum(
        (
            result
            * torch.linspace(0.5, 1.5, result.numel(), device=device, dtype=torch.float64)
            .to(result.dtype)
            .view(result.shape)
        )
        .double()
        .sum()
        for result in results
    )
    gradients = torch.autograd.grad(total, leaves)
    return [x.detach() for x in (*results, *gradients)]


def _mask(device: torch.device, heads: range | None = None) -> Any:
    import torch

    from mpctl.train.kernels.counter_rng import DropoutMask

    samples = torch.tensor([3, 1_000_000_007], device=device)
    columns = range(64) if heads is None else range(96)
    return DropoutMask(0x12345678, 0.25, samples, range(96), columns, heads)


BOTH = ("float32", "bfloat16")


def compared(
    device: torch.device,
    operation: Callable[..., Any],
    *inputs: Tensor,
    dtypes: Sequence[str] = BOTH,
    reference: Callable[..., Any] | None = None,
) -> str:
    """`held_to_float64` in these types."""
    errors = [held_to_float64(device, operation, inputs, dtype, reference) for dtype in dtypes]
    return f"errors: {', '.join(errors)}"


@check("kernel dropout", 20)
def dropout(device: torch.device) -> str:
    """Dropout with the residual sum."""
    return compared(
        device, lambda k, on, x, r: k.dropout_add(x, _mask(on), r), drawn(2, 96, 64), drawn(2, 96, 64, seed=2)
    )


@check("kernel norm", 20)
def norm(device: torch.device) -> str:
    """LayerNorm and RMSNorm of a stream and a branch."""

    def both(kernels: Any, on: Any, x: Tensor, branch: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        centred = kernels.residual_norm(x, branch, w, b, 1e-5, centred=True)
        return [*centred, *kernels.residual_norm(x, branch, w, None, 1e-5, centred=False)]

    return compared(device, both, drawn(2, 16, 64), drawn(2, 16, 64, seed=2), drawn(64, seed=3), drawn(64, seed=4))


@check("kernel activation", 20)
def activation(device: torch.device) -> str:
    """A gated activation, the squared ReLU, and GELU with the sum for its bias."""

    def gated(kernels: Any, on: Any, x: Tensor) -> list[Tensor]:
        return [kernels.activation(x, "swiglu"), kernels.activation(x, "relu2")]

    def summed(kernels: Any, on: Any, x: Tensor, bias: Tensor) -> Tensor:
        return kernels.summed_activation(x, "gelu", bias)  # type: ignore[no-any-return]

    def separate(kernels: Any, on: Any, x: Tensor, bias: Tensor) -> Tensor:
        held = x + (bias - bias.detach())  # x contains the bias: the gradient alone is added
        return kernels.activation(held, "gelu")  # type: ignore[no-any-return]

    return "; ".join(
        [
            compared(device, gated, drawn(2, 16, 128)),
            compared(device, summed, drawn(2, 16, 64), drawn(64, seed=2), reference=separate),
        ]
    )


@check("kernel rotate", 20)
def rotate(device: torch.device) -> str:
    """Rotary positions."""
    angles = drawn(96, 8)
    return compared(
        device,
        lambda k, on, x: k.rotate(x, angles.cos().to(on, x.dtype), angles.sin().to(on, x.dtype)),
        drawn(2, 4, 96, 16),
        dtypes=("float32",),
    )


@check("kernel attention", 60)
def attention(device: torch.device) -> str:
    """Blockwise, causal, with dropout, a window and two heads to a key-value head."""
    from mpctl.train.kernels.attention import AttentionVariant

    def attended(kernels: Any, on: Any, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        mask = _mask(on, range(4, 8))
        dropped = AttentionVariant(range(96), is_causal=True, dropout=mask)
        window = AttentionVariant(range(96), is_causal=True, window=17)
        return [kernels.attention(q, k, v, variant) for variant in (dropped, window)]

    heads = [drawn(2, n, 96, 64, seed=n) for n in (4, 2, 3)]
    return compared(device, attended, heads[0], heads[1], heads[2][:, :2], dtypes=("bfloat16",))


@check("plain attention", 20)
def plain_attention(device: torch.device) -> str:
    """torch's own choice, such as cuDNN's kernel."""
    import torch

    from mpctl.train.kernels.attention import AttentionVariant

    variant = AttentionVariant(range(128), is_causal=True)
    heads = [drawn(1, 4, 128, 128, seed=n) for n in range(3)]
    error = compared(device, lambda k, on, *qkv: k.attention(*qkv, variant), *heads, dtypes=("bfloat16",))
    query = heads[0].to(device, torch.bfloat16)
    return f"{kernels_of(device).attention_name(query, query, query, variant)}, {error}"


@check("kernel cross entropy", 20)
def cross_entropy(device: torch.device) -> str:
    """Its three passes over logits, none of which has a gradient."""
    import torch

    from mpctl.train.kernels.backend import TORCH_BACKEND

    logits = drawn(96, 640).mul(4).float()

    def passes(kernels: KernelBackend, on: Any, own: Tensor) -> list[Tensor]:
        column = torch.arange(96, device=on)
        peak = kernels.row_maximum(own, words=600)
        shares, sums = kernels.own_sums(own, column, peak, words=600)
        hit = torch.full_like(peak, -0.9)
        slope = kernels.logits_gradient(own, column, peak, 1 / sums, hit, words=600, overwrite=False)
        return [peak, shares, sums, slope]

    found = passes(kernels_of(device), device, logits.to(device))
    exact = passes(TORCH_BACKEND, torch.device("cpu"), logits.double())
    return _nearly(found, exact, "float32")


def _nearly(found: Sequence[Tensor], exact: Sequence[Tensor], dtype: str) -> str:
    worst = max(
        float((here.double().cpu() - there).abs().max() / there.abs().max())
        for here, there in zip(found, exact, strict=True)
    )
    if not worst <= CLOSE[dtype]:
        raise RuntimeError(f"{dtype}: the largest error is {worst:.1e}, allowed {CLOSE[dtype]:.1e}")
    return f"errors: {dtype} {worst:.0e}"


@check("kernel fp8 cast", 20)
def fp8_cast(device: torch.device) -> str:
    """To e4m3, by rows and by columns, with the bits of a CPU."""
    import torch

    from mpctl.train.kernels.backend import TORCH_BACKEND

    x, cpu = drawn(96, 64).mul(3).bfloat16(), torch.device("cpu")

    def cast(kernels: KernelBackend, on: torch.device) -> list[Tensor]:
        amax, scale = torch.zeros((), device=on), torch.full((), 16.0, device=on)
        made = kernels.fp8_cast(x.to(on), scale, torch.float8_e4m3fn, columns=True, amax=amax)
        assert made.by_rows is not None and made.by_columns is not None
        return [one.cpu().float() for one in (made.by_rows, made.by_columns, amax)]

    for here, there in zip(cast(kernels_of(device), device), cast(TORCH_BACKEND, cpu), strict=True):
        if not torch.equal(here, there):
            raise RuntimeError("other bits than a CPU's")
    return "the bits of a CPU"


@check("kernel adamw", 20)
def adamw(device: torch.device) -> str:
    """An update of two tensors, with bf16 copies."""
    import torch

    from mpctl.train.kernels.adamw import AdamWStep
    from mpctl.train.kernels.backend import TORCH_BACKEND

    def updated(kernels: KernelBackend, on: torch.device, dtype: torch.dtype) -> list[Tensor]:
        shapes, is_exact = ((1000,), (3, 5)), dtype == torch.float64

        def tensors(seed: int) -> list[Tensor]:
            return [drawn(*shape, seed=seed).float().to(on, dtype) for shape in shapes]

        values = tensors(1)
        copies = [] if is_exact else [torch.zeros_like(x, dtype=torch.bfloat16) for x in values]
        counts = [torch.tensor(3.0, device=on) for _ in shapes]
        kernels.adamw(
            AdamWStep(
                values,
                tensors(2),
                tensors(3),
                [x.square() for x in tensors(4)],
                counts,
                copies,
                1e-3,
                0.1,
                0.9,
                0.95,
                1e-8,
            )
        )
        return values

    found = updated(kernels_of(device), device, torch.float32)
    exact = updated(TORCH_BACKEND, torch.device("cpu"), torch.float64)
    return _nearly(found, exact, "float32")


@check("kernel rows", 20)
def rows(device: torch.device) -> str:
    """Tokens to their experts and back, weighted."""
    from mpctl.train.kernels.routing import (
        choose_experts,
        combined_rows,
        dispatched_rows,
        expert_counts,
        rows_by_expert,
    )

    def routed(kernels: Any, on: Any, x: Tensor, weights: Tensor) -> Tensor:
        experts = choose_experts(drawn(40, 8, seed=3).to(on).float(), 2).experts
        order = rows_by_expert(experts, expert_counts(experts, 1, 8)[0], parts=1, copies=1)
        sent = dispatched_rows(x, order, kernels)
        return combined_rows(sent, weights, order.places, kernels)

    return compared(device, routed, drawn(40, 64), drawn(40, 2, seed=2), dtypes=("float32",))


# ---------------------------------------------------------------- what libraries do


@check("addmm out_dtype", 20)
def add_product(device: torch.device) -> str:
    """A weight's gradient: a product of bf16 added to float32."""
    import torch

    dy, x, out = (
        t.to(device)
        for t in (drawn(96, 64).bfloat16(), drawn(96, 32, seed=2).bfloat16(), drawn(64, 32, seed=3).float())
    )
    exact = out.double().cpu() + dy.double().cpu().T @ x.double().cpu()
    kernels = kernels_of(device)
    kernels.add_product(dy, x, out, adds=True)
    first = torch.empty_like(out)
    kernels.add_product(dy, x, first, adds=False)
    close = "bfloat16" if device.type == "cpu" else "float32"
    return _nearly([out, first], [exact, dy.double().cpu().T @ x.double().cpu()], close)


@check("fp8 product", 20)
def fp8_product(device: torch.device) -> str:
    """torch._scaled_mm of e4m3 with e4m3 and e5m2, fast and exact sums."""
    import torch

    from mpctl.train.kernels.fp8 import Fp8Matrix

    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise Skipped("this device has no fp8")
    found, exact = [], []
    for other, fast in ((torch.float8_e4m3fn, True), (torch.float8_e5m2, False)):
        a, b = drawn(64, 128).to(torch.float8_e4m3fn), drawn(32, 128, seed=2).to(other)
        one, half = torch.ones(()), torch.full((), 0.5)
        exact.append(a.double() @ b.double().T * 0.5)
        operands = Fp8Matrix(a.to(device), one.to(device)), Fp8Matrix(b.to(device), half.to(device))
        found.append(kernels_of(device).fp8_product(*operands, out=torch.bfloat16, fast=fast))
    return _nearly(found, exact, "bfloat16")


@check("process group", 40)
def process_group(device: torch.device) -> str:
    """A communicator of one rank (NCCL; gloo on a CPU): three kinds of message in two groups."""
    import torch
    import torch.distributed as dist

    from mpctl.train.runtime.process_group import BACKENDS
    from mpctl.train.transport.group import _gather_slices, _scatter_slices

    backend = BACKENDS[device.type]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    on = device if device.type == "cuda" else None
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=on)
    try:
        x = torch.arange(12.0, device=device).view(3, 4)
        for group in (None, dist.new_group([0], backend=backend)):
            summed, whole, part = x.clone(), torch.empty_like(x), torch.empty_like(x)
            works = [
                dist.all_reduce(summed, group=group, async_op=True),
                _gather_slices(whole.unbind(), x.unbind(), group=group, async_op=True),
                _scatter_slices(part.unbind(), x.unbind(), group=group, async_op=True),
            ]
            for work in works:
                if work is not None:
                    work.wait()
            if not all(torch.equal(one, x) for one in (summed, whole, part)):
                raise RuntimeError("a message arrived changed")
    finally:
        dist.destroy_process_group()
    return f"{backend}: all-reduce, all-gather and reduce-scatter in two groups"


@check("host copies", 20)
def host_copies(device: torch.device) -> str:
    """A copy to pinned memory on a side stream, and an offloaded input that comes back."""
    import torch

    from mpctl.train.checkpoint.snapshot import HostCopies
    from mpctl.train.layers.recompute import HostOffload
    from mpctl.train.transport.streams import side_stream

    x = drawn(512, 512).float().to(device)
    copies = HostCopies(side_stream(device))
    copy, arrived = copies.keep("x", x), copies.stream.mark()
    copies.join()
    arrived.synchronize()
    offload = HostOffload.of(side_stream(device), device)
    back = offload.take(*offload.put(x))
    if not (torch.equal(copy, x.cpu()) and torch.equal(back, x)):
        raise RuntimeError("a copy has other values")
    if copy.is_pinned() != (device.type == "cuda"):
        raise RuntimeError("the copy is not in pinned memory")
    return "pinned" if copy.is_pinned() else "without pinned memory"


def _dropped(device: torch.device) -> Callable[[Tensor], Tensor]:
    kernels, mask = kernels_of(device), _mask(device)
    return lambda x: kernels.dropout(x, mask)


@check("second launches", 20)
def second_launches(device: torch.device) -> str:
    """A launch that mpctl prepared (train/kernels/triton/launch.py) computes what Triton's first one
    does, at another address too."""
    import torch

    if device.type == "cpu":
        raise Skipped("interpreted kernels are not prepared")
    drop, x = _dropped(device), drawn(2, 96, 64).float().to(device)
    first, again, moved = drop(x), drop(x), drop(x.clone())
    if not (torch.equal(first, again) and torch.equal(first, moved)):
        raise RuntimeError("a second launch computes something else")
    return "the bits of the first"


@check("cuda graph", 20)
def cuda_graph(device: torch.device) -> str:
    """A kernel is captured and replayed on new values."""
    import torch

    if device.type == "cpu":
        raise Skipped("a CPU has no CUDA graphs")
    drop, x = _dropped(device), drawn(2, 96, 64).float().to(device)
    drop(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = drop(x)
    x.mul_(2)
    graph.replay()
    if not torch.equal(result, drop(x)):
        raise RuntimeError("a replay computes something else")
    return "replayed"


# ---------------------------------------------------------------- steps


STEP: dict[str, Any] = {
    "cluster.nodes": 1,
    "cluster.gpus_per_node": 1,
    "model.family": "gpt",
    "model.layers": 2,
    "model.hidden": 64,
    "model.heads": 4,
    "model.vocab": 512,
    "model.seq_length": 64,
    "training.micro_batch_size": 2,
    "training.global_batch_size": 4,
    "training.steps": 2,
    "training.dtype": "bf16",
    "training.eval_samples": 0,
    "training.dropout": 0.0,
    "training.attention_dropout": 0.0,
    "training.learning_rate": 1e-3,
    "checkpoint.interval": 0,
    "checkpoint.at_end": False,
    "launch.threads_per_rank": 1,
}
LOSS = 6.238  # log 512: what a model that knows nothing has


def steps(device: torch.device, **changes: Any) -> str:
    """Two steps of a small model on one rank; the first loss is that of a fresh model."""
    from benchmarks.gpu.data import write_data
    from mpctl.model.layout.job_layout import JobLayout
    from mpctl.spec.load import load_job
    from mpctl.train.runtime.build import build_trainer
    from mpctl.train.runtime.device import prepare_device
    from mpctl.train.runtime.environment import RuntimeEnvironment

    given = {key.replace("__", "."): value for key, value in changes.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_data(folder, 512, texts=20)
        job = load_job(None, {**STEP, "launch.device": device.type, "data.path": str(data), **given})
        prepare_device(job, 0)
        environment = RuntimeEnvironment.of_machine(job, folder, local_rank=0)
        trainer = build_trainer(folder, JobLayout.of(job), 0, environment)
        losses = [record["loss"] for record in trainer.run()]
    if not all(loss is not None and abs(loss - LOSS) < 0.5 for loss in losses):
        raise RuntimeError(f"losses {losses}, of a fresh model near {LOSS}")
    return f"losses {', '.join(f'{loss:.4f}' for loss in losses if loss is not None)}"


STEPS: dict[str, dict[str, Any]] = {
    "fp32": {"training__dtype": "fp32"},
    "bf16": {},
    "dropout": {"training__dropout": 0.1, "training__attention_dropout": 0.1},
    "fp8": {"training__dtype": "fp8"},
    "experts": {"model__experts": 4, "model__experts_per_token": 2, "model__expert_ffn": 64},
    "zero 3": {"parallel__zero": 3},
    "recompute, offload": {"training__recompute": "full", "training__offload_activations": True},
    "adapters": {"training__adapter": {"rank": 4, "dropout": 0.1}},
    "bf16 optimizer": {"training__optimizer_dtype": "bf16", "training__master_weights": False},
}


def _add_steps() -> None:
    for name, changes in STEPS.items():

        def run(device: torch.device, changes: dict[str, Any] = changes) -> str:
            return steps(device, **changes)

        check(f"step {name}", 30)(run)


_add_steps()


# ---------------------------------------------------------------- the process


def main(kind: str, names: Sequence[str]) -> None:
    """Make these checks and print their results."""
    for name in names:
        began = time.monotonic()
        try:
            if name in ("compiler", "packages"):
                status, words = "ok", CHECKS[name].run(None)  # type: ignore[arg-type]
            else:
                import torch

                device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
                status, words = "ok", CHECKS[name].run(device)
                if kind == "cuda":
                    torch.cuda.synchronize(device)
        except Skipped as why:
            status, words = "skipped", str(why)
        except Exception as error:
            traceback.print_exc()
            reason = next(iter(str(error).splitlines()), "")
            status, words = "FAILED", f"{type(error).__name__}: {reason}"
        result = {"name": name, "status": status, "words": words, "seconds": round(time.monotonic() - began, 2)}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
