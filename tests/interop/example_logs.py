"""Short logs in the format of each launcher, written by hand for these tests.

Formats: those whose sources the modules of mpctl/interop name. Each has the
times that it is given, the first one as a step that compiles.
"""

from __future__ import annotations

from collections.abc import Sequence

TIMES = (9.0, 2.5, 2.0, 2.02, 1.98, 2.0, 2.01)
STEP = 2.0
"""The median of TIMES after a warm-up of two lines."""
WORLD, BATCH, LENGTH = 16, 32, 8192


def megatron(times: Sequence[float] = TIMES, *, arguments: str = "", batch: int = BATCH) -> str:
    head = f"using world size: {WORLD}, data-parallel size: 8, context-parallel size: 1, "
    lines = [
        f" [2026-11-01 10:00:{n:02d}.123456] iteration {n:8d}/{500:8d} | consumed samples: "
        f"{n * batch:12d} | elapsed time per iteration (ms): {1000 * t:.1f} | throughput per GPU "
        f"(TFLOP/s/GPU): {800 / t:.1f} | learning rate: 1.000000E-04 | global batch size: "
        f"{batch:5d} | lm loss: 8.123456E+00 | loss scale: 1.0 | grad norm: 1.234 |"
        for n, t in enumerate(times, 1)
    ]
    return "\n".join([head, *arguments.splitlines(), *lines]) + "\n"


ARGUMENTS = """\
------------------------ arguments ------------------------
  add_bias_linear ................................. False
  attention_backend ............................... AttnBackend.auto
  attention_dropout ............................... 0.0
  bf16 ............................................ True
  cross_entropy_loss_fusion ....................... True
  ffn_hidden_size ................................. 14336
  global_batch_size ............................... 32
  group_query_attention ........................... True
  hidden_dropout .................................. 0.0
  hidden_size ..................................... 4096
  max_position_embeddings ......................... 8192
  micro_batch_size ................................ 1
  normalization ................................... RMSNorm
  num_attention_heads ............................. 32
  num_layers ...................................... 32
  num_query_groups ................................ 8
  overlap_grad_reduce ............................. True
  overlap_param_gather ............................ True
  pipeline_model_parallel_size .................... 2
  position_embedding_type ......................... rope
  recompute_modules ............................... ['core_attn']
  seq_length ...................................... 8192
  sequence_parallel ............................... True
  swiglu .......................................... True
  tensor_model_parallel_size ...................... 4
  tp_comm_overlap ................................. True
  train_iters ..................................... 500
  untie_embeddings_and_output_weights ............. True
  use_distributed_optimizer ....................... True
  virtual_pipeline_model_parallel_size ............ None
  world_size ...................................... 16
-------------------- end of arguments ---------------------
 > padded vocab (size: 128256) with 256 dummy tokens (new size: 128512)
"""


def torchtitan(times: Sequence[float] = TIMES, *, dp: int = WORLD) -> str:
    """With colours and torchrun's rank, and the mesh and batch of its start."""
    tokens = BATCH * LENGTH / WORLD
    head = [
        f"Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard={dp}, cp=1, tp=1, ep=1, etp=1",
        "Building llama3 8B with TransformerModelArgs(dim=4096)",
        f"Trainer is initialized with local batch size 1, global batch size {BATCH}, gradient "
        f"accumulation steps 2, sequence length {LENGTH}, total steps 500 (warmup 100)",
    ]
    steps = [
        f"\x1b[31mstep: {10 * n if n else 1:2}  \x1b[32mloss:  8.02770  \x1b[38;5;208mgrad_norm:  "
        f"1.4604  \x1b[33mmemory: 41.21GiB(51.86%)  \x1b[34mtps: {round(tokens / t):,}  \x1b[36m"
        f"tflops: {800 / t:,.2f}  \x1b[35mmfu: 41.04%\x1b[39m"
        for n, t in enumerate(times)
    ]
    prefix = "[rank0]:[titan] 2026-11-01 10:00:58,838 - root - INFO - "
    return "\n".join(prefix + line for line in (*head, *steps))


def deepspeed(times: Sequence[float] = TIMES) -> str:
    return "\n".join(
        f"steps: {10 * n} loss: 8.1234 iter time (s): {t:.3f} samples/sec: {BATCH / t:.3f}"
        for n, t in enumerate(times, 1)
    )


def deepspeed_rates(times: Sequence[float] = TIMES) -> str:
    return "\n".join(
        f"[2026-11-01 10:00:58,838] [INFO] [timer.py:264:stop] epoch=0/micro_step={40 * n}/"
        f"global_step={10 * n}, RunningAvgSamplesPerSec={BATCH / 2.2}, CurrSamplesPerSec="
        f"{BATCH / t}, MemAllocated=2.0GB, MaxMemAllocated=9.5GB"
        for n, t in enumerate(times, 1)
    )


NANOTRON_CONFIG = """\
Config(general=GeneralArgs(project='p',
                           run='r_%date_(1)',
                           seed=42),
       parallelism=ParallelismArgs(dp=4,
                                   pp=2,
                                   tp=2,
                                   pp_engine=<nanotron.OneForwardOneBackward object at 0x7f>,
                                   tp_mode=<TensorParallelLinearMode.REDUCE_SCATTER: 2>,
                                   tp_linear_async_communication=True,
                                   recompute_layer=False,
                                   expert_parallel_size=1),
       model=ModelArgs(model_config=LlamaConfig(bos_token_id=1,
                                                hidden_act='silu',
                                                hidden_size=4096,
                                                intermediate_size=14336,
                                                is_llama_config=True,
                                                max_position_embeddings=8192,
                                                num_attention_heads=32,
                                                num_hidden_layers=32,
                                                num_key_value_heads=8,
                                                rms_norm_eps=1e-05,
                                                rope_theta=500000.0,
                                                tie_word_embeddings=False,
                                                vocab_size=128256),
                       init_method=RandomInit(std=0.025),
                       dtype=torch.bfloat16,
                       make_vocab_size_divisible_by=1),
       tokens=TokensArgs(sequence_length=8192,
                         train_steps=15,
                         micro_batch_size=1,
                         batch_accumulation_per_replica=8),
       optimizer=OptimizerArgs(zero_stage=1,
                               accumulate_grad_in_fp32=True,
                               clip_grad=1.0),
       lighteval=None)"""


def nanotron(times: Sequence[float] = TIMES) -> str:
    """Figures of three digits with K and M; its config, as pprint breaks it over lines."""

    def short(value: float) -> str:
        for unit, suffix in ((1e6, "M"), (1e3, "K")):
            if value >= unit:
                return f"{value / unit:.3g}{suffix}"
        return f"{value:.3g}"

    prefix = "11/01/2026 10:00:22 [INFO|DP=0|PP=0|TP=0|ip-26-0-1-2]: "
    rate = BATCH * LENGTH
    steps = (
        f"iteration: {n} / 15 | consumed_tokens: {short(n * rate)} | elapsed_time_per_iteration_ms:"
        f" {short(1000 * t)} | tokens_per_sec: {short(rate / t)} | tokens_per_sec_per_gpu: "
        f"{short(rate / t / WORLD)} | global_batch_size: {BATCH} | lm_loss: 11.2 | lr: 0.0003 | "
        f"model_tflops_per_gpu: {800 / t:.3g} | hardware_tflops_per_gpu: {900 / t:.3g} | "
        "grad_norm: 1.2"
        for n, t in enumerate(times, 1)
    )
    return "\n".join(prefix + line for line in ("Config:", *NANOTRON_CONFIG.splitlines(), *steps))


def trainer(times: Sequence[float] = TIMES) -> str:
    """One line of carriage returns, beside bars of loading and of an evaluation."""
    loading = "Loading checkpoint shards: 100%|####| 4/4 [00:03<00:00,  1.20it/s]\n"
    evaluation = "".join(f"\r {n}/8 [00:0{n}<00:01,  7.00it/s]" for n in range(1, 8))
    bars = "".join(
        f"\r  {n}%|#    | {n}/500 [00:{4 * n:02d}<16:40,  {t:.2f}s/it, loss=2.1]" for n, t in enumerate(times, 1)
    )
    return (
        f"{loading}  0%|     | 0/500 [00:00<?, ?it/s]{bars}\n"
        "{'loss': 2.1, 'grad_norm': 1.2, 'learning_rate': 4.9e-05, 'epoch': 0.01}\n"
        f"{evaluation}\n"
    )


SUMMARY = (
    "{'train_runtime': 225.8, 'train_samples_per_second': 64.0, 'train_steps_per_second': 0.5, "
    "'train_loss': 1.2, 'epoch': 0.32}\n"
)
LOGS = {
    "megatron": megatron,
    "torchtitan": torchtitan,
    "deepspeed": deepspeed,
    "nanotron": nanotron,
    "trainer": trainer,
}
