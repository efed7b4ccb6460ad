"""The causes of slow steps: words, and what to type to check each.

From published cases and the sources of the launchers: stas00/ml-engineering (throttling, NCCL),
Megatron-LM, torchtitan and DeepSpeed issues, BigScience's chronicles (a slow GPU: 5.7 %; launch
blocking; micro batches), arXiv 2505.05713 (3,079 jobs: last stage 39 %, sequence lengths 21 %, slow
worker 2 %), arXiv 2402.15627 (garbage collection, slow hosts), arXiv 2407.21783 (heat).
"""

from __future__ import annotations

from typing import NamedTuple


class Cause(NamedTuple):
    """words: what is wrong; checks: commands or settings that tell, the likeliest first."""

    words: str
    checks: tuple[str, ...]


_CLOCK = "nvidia-smi -q -d PERFORMANCE,POWER"
_NCCL = "NCCL_DEBUG=INFO: want `NET/IB : Using`, not `NET/Socket : Using`"
_TESTS = "nccl-tests over the same nodes, then pairwise: all_reduce_perf -b 64M -e 1G -f 2"
CAUSES = {
    "device-clock": Cause(
        "clock, power limit, or one device that the others wait for",
        (_CLOCK, "dcgmi diag -r 2, on every host", "mpctl bench kernels, on one device"),
    ),
    "busy-host": Cause(
        "other work takes the cores, or they clock lower",
        ("top: other processes on these cores; taskset -p PID", "cpupower frequency-info"),
    ),
    "network": Cause(
        "sockets, wrong HCA, GPUDirect off, congestion",
        (_NCCL, _TESTS, "ibstat; nvidia-smi topo -m; lsmod | grep peermem (GPUDirect RDMA)"),
    ),
    "intra-node": Cause(
        "PCIe instead of NVLink, or a link down",
        ("nvidia-smi topo -m; nvidia-smi nvlink -s", "nccl-tests on one node: all_reduce_perf -b 64M -e 1G -f 2 -g 8"),
    ),
    "host-bound": Cause(
        "launching kernels: threads, NUMA, CPU governor, Python",
        ("echo $OMP_NUM_THREADS; numactl --show; nproc", "py-spy top --pid PID; nsys profile"),
    ),
    "pipeline-split": Cause(
        "a stage with more work: loss, embedding, uneven layers",
        (
            "--account-for-loss-in-pipeline-split, --account-for-embedding-in-pipeline-split",
            "timers by rank (--timing-log-level 2): which stage computes longest",
        ),
    ),
    "moe-imbalance": Cause(
        "ranks wait for the fullest experts",
        (
            "log tokens by expert; --moe-router-load-balancing-type, --moe-aux-loss-coeff",
            "mpctl plan --set training.moe_load=1.5",
        ),
    ),
    "overlap": Cause(
        "gradients and parameters sent after, not during compute",
        (
            "echo $CUDA_DEVICE_MAX_CONNECTIONS (1 before Blackwell, unset for FSDP), set before start",
            "--overlap-grad-reduce --overlap-param-gather; DeepSpeed: overlap_comm",
        ),
    ),
    "tp-comm-overlap": Cause(
        "messages of tp sent after, not during compute",
        ("--tp-comm-overlap: silently off without --sequence-parallel or Transformer Engine",),
    ),
    "attention": Cause(
        "attention runs unfused",
        (
            "a torch profile: names of attention's kernels",
            "--attention-backend flash; head dimension and mask that it supports",
        ),
    ),
    "recompute": Cause(
        "activations are computed twice (full recomputation)",
        ("--recompute-granularity, activation checkpointing: off or selective",),
    ),
    "fp32": Cause(
        "products run in fp32 or TF32",
        ("grep dtype in the log; --bf16", "torch.backends.cuda.matmul.allow_tf32, torch.set_float32_matmul_precision"),
    ),
    "sequence-parallel": Cause("norms and dropout repeat on all ranks of tp", ("--sequence-parallel",)),
    "distributed-optimizer": Cause("every replica updates all of its parameters", ("--use-distributed-optimizer",)),
    "micro-batch": Cause(
        "micro batches are small: products do not fill the device", ("--micro-batch-size 2, if memory allows",)
    ),
    "slow-gpu": Cause(
        "one GPU or host slower (heat, power, fault), all wait for it",
        (
            f"{_CLOCK}, on every host: which one differs",
            "Megatron: --log-straggler; else time by rank, or restart without half of the hosts",
            "dcgmi diag -r 2; nvidia-smi --query-remapped-rows=gpu_bus_id,remapped_rows.pending --format=csv",
        ),
    ),
    "slow-link": Cause(
        "a link down, flapping, or shared with new neighbours",
        ("/sys/class/infiniband/*/ports/*/counters: link_downed, symbol_error, port_xmit_wait", _TESTS),
    ),
    "host-growth": Cause(
        "host work grows: garbage collection, leaks, logging",
        (
            "--manual-gc --manual-gc-interval 100 (torchtitan: gc_freq)",
            "py-spy dump --pid PID; memory of the processes over time",
        ),
    ),
    "heat": Cause(
        "devices become warmer and clock down",
        (_CLOCK, "nvidia-smi --query-gpu=temperature.gpu,clocks.sm --format=csv -l 60"),
    ),
    "checkpoint": Cause(
        "steps wait for checkpoints", ("--async-save, or save less often", "time a write of that size to the same disk")
    ),
    "evaluation": Cause("steps wait for evaluations", ("evaluate less often, or on fewer samples",)),
    "loader": Cause(
        "waiting for data: workers, storage",
        ("more num_workers, prefetch_factor, pin_memory", "run with random data (mock): does it go away?"),
    ),
    "gc": Cause(
        "Python collects garbage, each rank at its own step",
        (
            "--manual-gc --manual-gc-interval 100 (torchtitan: gc_freq)",
            "gc.disable() after start, gc.collect() every 100 steps on all ranks",
        ),
    ),
    "profiler": Cause("a profiler, logger or monitor at these steps", ("switch it off for 200 steps",)),
    "sequence-spread": Cause(
        "lengths differ from step to step (attention is quadratic)",
        ("log tokens and sum of squared lengths by step; pack or sort sequences",),
    ),
    "first-steps": Cause(
        "compilation, autotuning, caches, allocator",
        ("compare from a later step; keep compile caches (TORCHINDUCTOR_CACHE_DIR)",),
    ),
    "allocator-retries": Cause(
        "memory is full: the allocator frees and allocates again",
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "smaller micro batches, or more recomputation"),
    ),
    "memory-full": Cause(
        "memory is nearly full, where allocators start to retry",
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "smaller micro batches, or more recomputation"),
    ),
    "sockets": Cause(
        "NCCL over TCP instead of InfiniBand or RoCE", (f"{_NCCL}", "libibverbs and /dev/infiniband in the container")
    ),
    "link-errors": Cause("a network port reports errors", ("ibstat; dmesg | grep mlx5", _TESTS)),
    "straggler": Cause(
        "one rank computes longer than its equals", (f"{_CLOCK}, on its host", "restart without its host")
    ),
    "counting": Cause("the log's MFU is counted otherwise", ("compare seconds or tokens/s, not MFU",)),
    "other-job": Cause(
        "the log may be of a smaller job than planned",
        ("check sequence length, batch, layers and data type of the log",),
    ),
}
