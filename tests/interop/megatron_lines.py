"""Command lines of Megatron-LM: sizes of known models, each in a number of invented layouts.

A line is a shape and a variation of it. {layers} and {chunk} stand for the shape's layers and for
the layers of a chunk where each of 4 stages has several.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

ROTARY = "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear"
LLAMA = f"{ROTARY} --swiglu --untie-embeddings-and-output-weights"
RELU2 = "--position-embedding-type rope --squared-relu --disable-bias-linear"

SHAPES = {
    "gpt2-medium": (24, "--hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 50257"),
    "gpt3-1.3b": (
        24,
        "--hidden-size 2048 --num-attention-heads 32 --seq-length 2048 "
        "--vocab-size 50257 --hidden-dropout 0 --attention-dropout 0",
    ),
    "gpt3-175b": (
        96,
        "--hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --vocab-size 51200 --init-method-std 0.006",
    ),
    "narrow-swiglu": (
        12,
        "--hidden-size 768 --num-attention-heads 12 --seq-length 512 --swiglu "
        "--vocab-size 32000 --make-vocab-size-divisible-by 64",
    ),
    "llama-2-7b": (
        32,
        "--hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 "
        f"--seq-length 4096 --vocab-size 32000 --norm-epsilon 1e-6 {LLAMA}",
    ),
    "llama-2-70b": (
        80,
        "--hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672 "
        "--group-query-attention --num-query-groups 8 --seq-length 4096 "
        f"--vocab-size 32000 --hidden-dropout 0.0 {LLAMA}",
    ),
    "llama-3-8b": (
        32,
        "--hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 "
        "--group-query-attention --num-query-groups 8 --seq-length 8192 "
        f"--vocab-size 128256 --rotary-base 500000 --no-position-embedding {LLAMA}",
    ),
    "llama-3.1-70b": (
        80,
        "--hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672 "
        "--group-query-attention --num-query-groups 8 --seq-length 8192 "
        "--vocab-size 128256 --rotary-base 500000 --use-rope-scaling "
        f"--attention-dropout 0.0 {LLAMA}",
    ),
    "mistral-7b": (
        32,
        "--hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 "
        "--group-query-attention --num-query-groups 8 --seq-length 16384 "
        f"--vocab-size 32000 --window-size 4095,0 {LLAMA}",
    ),
    "qwen2.5-7b": (
        28,
        "--hidden-size 3584 --num-attention-heads 28 --ffn-hidden-size 18944 "
        "--group-query-attention --num-query-groups 4 --add-qkv-bias --seq-length 4096 "
        f"--vocab-size 151646 --rotary-base 1000000 {LLAMA}",
    ),
    "qwen3-8b": (
        36,
        "--hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 12288 "
        "--kv-channels 128 --group-query-attention --num-query-groups 8 --qk-layernorm "
        f"--seq-length 4096 --vocab-size 151936 --rotary-base 1000000 {LLAMA}",
    ),
    "nemotron-4-15b": (
        32,
        "--hidden-size 6144 --num-attention-heads 48 --ffn-hidden-size 24576 "
        "--group-query-attention --num-query-groups 8 --rotary-percent 0.5 "
        "--seq-length 4096 --vocab-size 256000 --apply-layernorm-1p "
        f"--untie-embeddings-and-output-weights {RELU2}",
    ),
}


class Variation(NamedTuple):
    """What is added to a shape, the ranks that run it, and whether CUDA_DEVICE_MAX_CONNECTIONS is
    1, as tensor parallelism asks and Megatron-FSDP forbids."""

    ranks: int
    words: str
    connects_once: bool = True


VARIATIONS = {
    "sequence": Variation(
        16,
        "--tensor-model-parallel-size 2 --sequence-parallel "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --bf16 "
        "--micro-batch-size 1 --global-batch-size 64 --lr 3e-4 --min-lr 3e-5 --train-iters 5000 "
        "--lr-warmup-iters 100 --lr-decay-style cosine --use-mcore-models",
    ),
    "deep": Variation(
        32,
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 "
        "--use-tp-pp-dp-mapping --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split --bf16 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1 --distribute-saved-activations "
        "--micro-batch-size 2 --global-batch-size 128 --attention-backend flash "
        "--no-bias-dropout-fusion --no-bias-swiglu-fusion",
    ),
    "interleaved": Variation(
        32,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 "
        "--num-layers-per-virtual-pipeline-stage {chunk} --sequence-parallel "
        "--use-distributed-optimizer --overlap-grad-reduce --bf16 --micro-batch-size 1 "
        "--global-batch-size 64 --grad-reduce-in-bf16 --weight-decay 0.1 --clip-grad 0.5 "
        "--train-samples 1280050 --lr-decay-samples 1024000 --lr-warmup-samples 6400 --lr 2e-4",
    ),
    "ring": Variation(
        16,
        "--context-parallel-size 2 --tensor-model-parallel-size 2 --bf16 "
        "--recompute-activations --attention-backend fused --micro-batch-size 1 "
        "--global-batch-size 32 --train-iters 20000 --lr-decay-iters 18000 --lr 1e-4 "
        "--lr-warmup-fraction 0.01 --data-path a_text_document --split 98,1,1 --save out "
        "--save-interval 500 --load out --log-interval 5 --eval-iters 8 --eval-interval 250 "
        "--tensorboard-dir tb --tokenizer-type NullTokenizer --distributed-timeout-minutes 20 "
        "--num-workers 4 --ckpt-format torch_dist --no-load-rng --log-throughput --manual-gc",
    ),
    "fp8": Variation(
        8,
        "--tensor-model-parallel-size 2 --bf16 --fp8-format hybrid "
        "--fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather "
        "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 "
        "--main-grads-dtype bf16 --micro-batch-size 1 --global-batch-size 16 "
        "--cross-entropy-loss-fusion --no-gradient-accumulation-fusion",
    ),
    "blocks": Variation(
        8,
        "--bf16 --fp8-format e4m3 --fp8-recipe blockwise --micro-batch-size 1 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --lr 2e-4 "
        "--train-iters 1000 --lr-decay-style WSD --lr-wsd-decay-iters 100 "
        "--lr-wsd-decay-style linear --lr-decay-iters 1000 --adam-beta2 0.95 --seed 42",
    ),
    "fp16": Variation(
        8,
        "--tensor-model-parallel-size 4 --fp16 --initial-loss-scale 65536 "
        "--loss-scale-window 500 --min-loss-scale 1.0 --hysteresis 2 "
        "--accumulate-allreduce-grads-in-fp32 --attention-backend unfused --micro-batch-size 4 "
        "--global-batch-size 64 --adam-eps 1e-6 --lr 6e-5 --min-lr 6e-6 --train-iters 300 "
        "--rampup-batch-size 16 16 3000",
    ),
    "local": Variation(
        4,
        "--tensor-model-parallel-size 2 --bf16 --transformer-impl local "
        "--no-persist-layer-norm --no-rope-fusion --attention-softmax-in-fp32 "
        "--micro-batch-size 1 --global-batch-size 8 --overlap-grad-reduce",
    ),
    "fsdp": Variation(
        16,
        "--use-megatron-fsdp --data-parallel-sharding-strategy "
        "optim_grads_params --use-distributed-optimizer --ckpt-format fsdp_dtensor "
        "--no-gradient-accumulation-fusion --overlap-grad-reduce --overlap-param-gather --bf16 "
        "--megatron-fsdp-main-params-dtype fp32 --recompute-granularity selective "
        "--recompute-modules core_attn --micro-batch-size 1",
        connects_once=False,
    ),
    "cut": Variation(
        8,
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout "
        "Et*{less}|t*{more}L --tensor-model-parallel-size 4 --padded-vocab-size 262144 --bf16 "
        "--micro-batch-size 1 --global-batch-size 16 --expert-model-parallel-size 1",
    ),
    "growing": Variation(
        64,
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 "
        "--sequence-parallel --bf16 --micro-batch-size 1 --overlap-grad-reduce "
        "--step-batch-size-schedule '0:64 20B:128 60B:256' --use-distributed-optimizer "
        "--overlap-param-gather --train-iters 250000 --lr 1.5e-4 --hysteresis 4",
    ),
}


BF16 = "--bf16 --micro-batch-size 1 --lr 3e-4 --train-iters 5000 --use-distributed-optimizer"
GROUPED = "--moe-grouped-gemm --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall"
EXPERT_LINES = {
    "mixtral": Variation(
        64,
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
        "--ffn-hidden-size 14336 --group-query-attention --num-query-groups 8 --seq-length 4096 "
        "--max-position-embeddings 32768 --vocab-size 32000 --rotary-base 1000000 --num-experts 8 "
        "--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 8 "
        "--expert-tensor-parallel-size 1 --pipeline-model-parallel-size 4 "
        "--num-layers-per-virtual-pipeline-stage 8 --global-batch-size 256 "
        f"--overlap-grad-reduce --overlap-param-gather {LLAMA} {BF16} {GROUPED}",
    ),
    "mixtral as tp": Variation(
        16,
        "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 "
        "--ffn-hidden-size 14336 --seq-length 4096 --max-position-embeddings 4096 "
        "--vocab-size 32000 --num-experts 8 --tensor-model-parallel-size 2 --sequence-parallel "
        f"--expert-model-parallel-size 4 --global-batch-size 64 {LLAMA} {BF16}",
    ),
    "deepseek-v3": Variation(
        1024,
        "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 "
        "--num-attention-heads 128 --kv-channels 128 --multi-latent-attention "
        "--q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
        "--v-head-dim 128 --qk-layernorm --seq-length 4096 --max-position-embeddings 4096 "
        "--vocab-size 129280 --make-vocab-size-divisible-by 1280 --num-experts 256 "
        "--moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048 "
        "--moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-bias-update-rate 1e-3 --moe-router-num-groups 8 --moe-router-group-topk 4 "
        "--moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type seq_aux_loss "
        "--moe-aux-loss-coeff 1e-4 --mtp-num-layers 1 --expert-model-parallel-size 64 "
        "--expert-tensor-parallel-size 1 --pipeline-model-parallel-size 16 "
        "--decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 1 "
        "--global-batch-size 8192 --moe-permute-fusion --moe-shared-expert-overlap "
        "--norm-epsilon 1e-6 --hidden-dropout 0 --attention-dropout 0 "
        f"{LLAMA} {BF16} {GROUPED}",
    ),
    "qwen2-moe": Variation(
        8,
        "--num-layers 24 --hidden-size 2048 --ffn-hidden-size 5632 "
        "--num-attention-heads 16 --seq-length 8192 --max-position-embeddings 8192 "
        "--vocab-size 151936 --add-qkv-bias --num-experts 60 --moe-router-topk 4 "
        "--moe-router-pre-softmax --moe-ffn-hidden-size 1408 "
        "--moe-shared-expert-intermediate-size 5632 --moe-shared-expert-gate "
        "--moe-aux-loss-coeff 1e-3 --moe-z-loss-coeff 1e-3 --expert-model-parallel-size 4 "
        "--moe-router-load-balancing-type global_aux_loss --global-batch-size 64 "
        f"{LLAMA} {BF16} --moe-router-dtype fp32 --moe-token-dispatcher-type flex "
        "--moe-enable-deepep",
    ),
}
"""Lines with experts, each with its ranks; their shape and layout are one text."""


def lines() -> dict[str, tuple[Variation, str]]:
    """Each line's name, its variation, and its flags as one text."""
    dense = {f"{shape} {name}": (row, _text(shape, row)) for shape, (name, row) in _pairs()}
    return dense | {name: (row, row.words) for name, row in EXPERT_LINES.items()}


def _pairs() -> product[tuple[str, tuple[str, Variation]]]:
    return product(SHAPES, VARIATIONS.items())


def _text(name: str, variation: Variation) -> str:
    layers, shape = SHAPES[name]
    per_stage = layers // 4
    words = variation.words.format(
        chunk=per_stage // 2 if per_stage % 2 == 0 else 1, less=layers // 2 - 1, more=layers - layers // 2 + 1
    )
    positions = shape.split("--seq-length ")[1].split()[0]
    return f"--num-layers {layers} {shape} --max-position-embeddings {positions} {words}"
