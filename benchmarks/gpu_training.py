"""A GPT of 1.5 billion parameters on one GPU, ours against plain torch with torch.compile:
`python -m benchmarks.gpu_training [ROUNDS]`; needs a CUDA device and says so where there is none.

28 layers, hidden 2048, 16 heads, vocabulary 50304, sequence 2048, bf16 with float32 masters, fused
AdamW, no dropout. Ours is `mpctl launch` as a user types it, on NCCL groups of one rank, with
launch.compile; the peer is the same model under bf16 autocast, compiled whole, in a process of its
own. Contenders take turns, ROUNDS times each; medians of the steps after the first ten.

MFU: (6 N + 12 L h s) FLOP a token (Chowdhery et al., arXiv 2204.02311, appendix B; N without the
position table) times tokens/s over the *measured* peak, the best of 20 bf16 products of 8192^3.
`--tiny` runs all of it on a small model and on CPU too, to see that the script itself works; what
it then prints is no result.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MPCTL = Path(sys.executable).with_name("mpctl")
STEPS, WARM, SIDE = 30, 10, 8192


@dataclass(frozen=True)
class Shape:
    layers: int = 28
    hidden: int = 2048
    heads: int = 16
    vocab: int = 50304
    seq: int = 2048
    batch: int = 8
    device: str = "cuda"

    @property
    def flops_per_token(self) -> float:
        parameters = self.layers * 12 * self.hidden**2 + self.vocab * self.hidden
        return 6 * parameters + 12 * self.layers * self.hidden * self.seq


TINY = Shape(2, 64, 4, 512, 64, 2, "cuda" if torch.cuda.is_available() else "cpu")


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        h, self.heads = shape.hidden, shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.o = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Plain(nn.Module):
    """The peer: learned positions, pre-norm, a tied head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word = nn.Embedding(shape.vocab, shape.hidden)
        self.place = nn.Embedding(shape.seq, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.word(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.word.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def plain(shape: Shape) -> dict[str, float]:
    """Seconds a step and peak bytes of the peer."""
    device = torch.device(shape.device)
    with device:
        model = Plain(shape)
        tokens = torch.randint(0, shape.vocab, (shape.batch, shape.seq + 1))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loss_of, seconds = torch.compile(model), []
    for _ in range(STEPS):
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        float(loss)  # as a training loop logs it: the host waits
        seconds.append(time.perf_counter() - began)
    return {"seconds": median(seconds[WARM:]), "bytes": _peak(device)}


def ours(shape: Shape, data: Path, run: Path) -> dict[str, float]:
    """The same of `mpctl launch`."""
    settings: dict[str, Any] = {
        "model.layers": shape.layers, "model.hidden": shape.hidden, "model.heads": shape.heads,
        "model.vocab": shape.vocab, "model.seq_length": shape.seq,
        "training.micro_batch_size": shape.batch, "training.steps": STEPS,
        "checkpoint.at_end": False, "training.eval_samples": 0,
        "training.learning_rate": 1e-4, "launch.compile": True,
        "data.path": str(data),
    }  # fmt: skip
    given = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    command = [MPCTL, "launch", "--nodes", "1", "--gpus-per-node", "1", "--dtype", "bf16",
               "--device", shape.device, "--run-dir", run]  # fmt: skip
    for one in given:
        command += ["--set", one]
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = median(line["step_seconds"] for line in lines[WARM:])
    return {"seconds": seconds, "bytes": max(lines[-1]["memory_bytes"])}


def matmul_peak(device: torch.device, side: int) -> float:
    """FLOP/s of the best of 20 bf16 products."""
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(20):
        _wait(device)
        began = time.perf_counter()
        a @ b
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return 2 * side**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def measure(shape: Shape, rounds: int) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {"plain + compile": [], "mpctl + compile": []}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        words = str(min(shape.vocab, 4000))
        sizes = ("--vocab-size", words, "--max-bytes", "8000000")
        prepare = (MPCTL, "data", "prepare", "python-stdlib", "--out", data, *sizes)
        subprocess.run(prepare, check=True, capture_output=True)
        for turn in range(rounds):
            own = [sys.executable, "-m", "benchmarks.gpu_training", "--plain"]
            told = subprocess.run(own + ["--tiny"] * (shape == TINY), check=True,
                                  capture_output=True, text=True)  # fmt: skip
            found["plain + compile"].append(json.loads(told.stdout.splitlines()[-1]))
            found["mpctl + compile"].append(ours(shape, data, Path(folder) / f"run-{turn}"))
    return found


def main() -> None:
    shape = TINY if "--tiny" in sys.argv else Shape()
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    if shape.device == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks.gpu_training needs a CUDA device; there is none (--tiny runs on CPU)")
    if "--plain" in sys.argv:
        print(json.dumps(plain(shape)))
        return
    device = torch.device(shape.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, no result"
    peak = matmul_peak(device, SIDE if device.type == "cuda" else 512)
    print(f"{name}, torch {torch.__version__}, measured matmul peak {peak / 1e12:.1f} TFLOP/s")
    print(f"{'':16} {'ms a step':>10} {'tokens/s':>10} {'GiB':>6} {'MFU':>6}")
    for who, rounds in measure(shape, numbers[0] if numbers else 3).items():
        seconds = median(round_["seconds"] for round_ in rounds)
        size = max(round_["bytes"] for round_ in rounds) / 2**30
        rate = shape.batch * shape.seq / seconds
        mfu = rate * shape.flops_per_token / peak
        print(f"{who:16} {seconds * 1e3:10.1f} {rate:10,.0f} {size:6.1f} {mfu:6.1%}")


if __name__ == "__main__":
    main()
