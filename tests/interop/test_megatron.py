"""The flags of Megatron-LM: written, read back as the same job, and refused where it has none."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.core.sharding import padded_vocab
from mpctl.interop.command_line import read_flags
from mpctl.interop.emitted import emit_plan
from mpctl.interop.from_megatron import layer_counts, read_megatron
from mpctl.interop.limits import overlaps_products
from mpctl.interop.megatron_experts import layer_pattern, read_pattern
from mpctl.interop.megatron_optimizers import gradients_of
from mpctl.model.pipeline.explicit import layout_parts
from mpctl.model.pipeline.stages import spans_of
from mpctl.plan.estimate.loss import loss_way
from mpctl.plan.planning.plan import Plan, load_plan
from mpctl.spec.job import JobSpec
from mpctl.spec.layout_text import parse_layout, write_layout
from mpctl.spec.runtime import job_profile
from tests.interop.jobs import EXAMPLE, GRID, LAYOUTS, MIXTURE, Settings, plan_of
from tests.interop.jobs import LATENT as LATENT_SHAPE

MEGATRON: Settings = {"training.runtime": "megatron-core"}


def flags_of(text: str) -> dict[str, str]:
    """The flags after the program, each with its values as one word."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    flags: dict[str, str] = {}
    for word in words[words.index("pretrain_gpt.py") + 1 :]:
        if word.startswith("--"):
            flags[name := word] = ""
        else:
            flags[name] = f"{flags[name]} {word}".strip()
    return flags


def said(job: JobSpec) -> dict[str, Any]:
    """The settings of a job in a command line: all but names, devices and those that only mpctl
    has."""
    tables: dict[str, Any] = job.model_dump(include={"parallel", "model", "training"})
    tables["model"] |= {"name": None, "source": None}
    way = loss_way(job.training, job_profile(job.training))
    tables["training"] |= {"min_learning_rate": job.training.lowest_rate, "cross_entropy": way}
    tables["training"] |= {"gradient_dtype": gradients_of(job)}
    tables["parallel"] |= {"tp_comm_overlap": overlaps_products(job)}
    return tables


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_written_is_read_as_the_same_job(name: str) -> None:
    plan = plan_of({**LAYOUTS[name], **MEGATRON})
    settings, warnings = read_megatron(emit_plan(plan, "megatron").text)
    again = load_plan(None, settings)
    assert said(again.job) == said(plan.job)
    assert again.stages == plan.stages
    assert again.topology == plan.topology
    assert [w.message for w in warnings] in ([], ["--ckpt-format"])


@pytest.mark.parametrize(
    "name", ["mixtral-8x7b", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3"]
)
def test_a_preset_with_experts_is_read_back_as_it_is(name: str) -> None:
    layout = {
        "model": name,
        "cluster.nodes": 8,
        "cluster.gpus_per_node": 8,
        "parallel.ep": 4,
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
    }
    plan = plan_of(MEGATRON, base=layout)
    text = emit_plan(plan, "megatron").body
    settings, warnings = read_megatron(text)
    again = load_plan(None, settings)
    assert (said(again.job), warnings) == (said(plan.job), ())
    assert emit_plan(again, "megatron").body == text


def test_the_example_is_said_as_megatron_documents_it() -> None:
    emitted = emit_plan(plan_of({}, base=EXAMPLE), "megatron")
    flags = flags_of(emitted.text)
    wanted = """--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
        --group-query-attention --num-query-groups 8 --seq-length 8192
        --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000 --swiglu
        --normalization RMSNorm --norm-epsilon 1e-05 --disable-bias-linear
        --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0
        --tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2
        --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 5
        --micro-batch-size 1 --global-batch-size 128 --bf16 --use-distributed-optimizer
        --overlap-grad-reduce --overlap-param-gather --recompute-granularity selective
        --recompute-modules core_attn"""
    assert flags_of(f"pretrain_gpt.py {wanted}").items() <= flags.items()
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nnodes 8 --nproc-per-node 8" in emitted.text
    for note in (
        "dp 2 = 64 ranks / (tp 4 x cp 2 x pp 4)",
        "global batch 128 = micro batch 1 x dp 2 x 64 micro batches a step",
        "vocabulary 128256, padded to 128512, a multiple of 128 x tp 4",
    ):
        assert note in emitted.notes
        assert f"# {note}\n" in emitted.text


def refusals(settings: Settings, target: str = "megatron") -> dict[str, str]:
    with pytest.raises(InputError) as caught:
        emit_plan(plan_of(settings), target)
    assert all(issue.hint and issue.message for issue in caught.value.issues)
    return {issue.rule: str(issue) for issue in caught.value.issues}


def test_what_megatron_has_no_flag_for_is_refused_all_at_once() -> None:
    found = refusals(
        {
            "parallel.tp": 2,
            "parallel.order": "dp-tp-cp-pp",
            "parallel.allow_tp_across_nodes": True,
            "model.activation": "relu",
            "training.dtype": "fp64",
            "training.freeze": ["embedding.*"],
        }
    )
    assert set(found) == {"emit-order", "emit-activation", "emit-dtype", "emit-freeze"}
    assert found["emit-order"] == (
        "parallel.order: dp-tp-cp-pp, and Megatron-LM numbers its ranks tp-cp-dp-pp or "
        "tp-cp-pp-dp, which are other groups (use order tp-cp-dp-pp or tp-cp-pp-dp)"
    )


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (GRID, "emit-tensor-mode"),
        ({"model.family": "bert"}, "emit-family"),
        ({"training.recompute": "full", "training.offload_activations": True}, "emit-offload-activations"),
        ({"training.seed": 0}, "emit-seed"),
        ({"training.gradient_dtype": "fp16"}, "emit-gradient-dtype"),
        ({"model.activation": "gelu_tanh", "model.bias": False}, "emit-activation"),
    ],
)
def test_a_refusal(settings: Settings, rule: str) -> None:
    assert rule in refusals(settings)


def test_an_order_of_axes_that_makes_the_same_groups_is_said() -> None:
    """cp is 1: its position in the order changes nothing."""
    plan = plan_of({"parallel.tp": 2, "parallel.order": "cp-tp-dp-pp"})
    assert "--use-tp-pp-dp-mapping" not in emit_plan(plan, "megatron").text


def test_what_is_approximated_is_a_comment() -> None:
    plan = plan_of({"parallel.pp": 4, "parallel.schedule": "zero-bubble", "parallel.zero": 2})
    notes = [note for note in emit_plan(plan, "megatron").notes if note.startswith("approx")]
    assert [note.split(":")[1].split()[0] for note in notes] == ["schedule", "ZeRO"]


def test_a_name_from_a_job_file_stays_in_its_comment() -> None:
    name = "x\nrm -rf ~\u2028--tp 3\x1b[2J"
    text = emit_plan(plan_of({"model.name": name}), "megatron").text
    assert [line for line in text.splitlines() if "rm -rf" in line] == [
        line for line in text.splitlines() if line.startswith("# x rm -rf ~ --tp 3 [2J")
    ]
    assert "\x1b" not in text


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_pipeline_layout_says_the_layers_of_every_part(pp: int) -> None:
    counts = [1, 3, 2, 1] if pp > 1 else [7]
    text = write_layout(layout_parts(spans_of(counts, pp)))
    assert layer_counts(text) == counts
    assert text == ("Et|t*3|tt|tL" if pp > 1 else "Et*7L")


def test_megatron_s_own_spellings_of_a_layout_are_read() -> None:
    assert layer_counts("Etttt|(tttt|)*18,ttttL") == [4] * 20
    for wrong in ("tttL", "Etm|tL", "Et*99999|(t|)*99999,tL", "E(t|L"):
        with pytest.raises(InputError):
            layer_counts(wrong)


SHAPE = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --vocab-size 50257 --micro-batch-size 2"
)


EXPERTS = "--num-experts 8 --disable-bias-linear"
BESIDE = (
    f"{EXPERTS} --expert-model-parallel-size 2 --bf16 --moe-token-dispatcher-type alltoall "
    "--overlap-moe-expert-parallel-comm"
)
FIXED = (
    f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep "
    "--moe-expert-rank-capacity-factor 4"
)
GROUPED = f"{EXPERTS} --moe-grouped-gemm --moe-permute-fusion --moe-router-dtype fp32"
LATENT = "--multi-latent-attention --position-embedding-type rope --disable-bias-linear"


def read_plan(flags: str, **more: Any) -> Plan:
    settings, _ = read_megatron(f"{SHAPE} {flags}")
    return load_plan(None, {**settings, "cluster.gpus_per_node": 8, **more})


def test_what_the_flags_leave_out_is_what_megatron_takes() -> None:
    job = read_plan("").job
    assert (job.training.dropout, job.training.attention_dropout) == (0.1, 0.1)
    assert (job.training.weight_decay, job.training.beta2) == (0.01, 0.999)
    assert (job.training.lr_schedule, job.training.lowest_rate) == ("linear", 0.0)
    assert (job.sizes["dp"], job.training.global_batch_size) == (8, 16)
    assert job.training.dtype == "fp32"
    assert not job.parallel.overlap_gradients


@pytest.mark.parametrize(
    ("flags", "setting", "value"),
    [
        ("--tensor-model-parallel-size=2", "parallel.tp", 2),
        ("--tensor-model-parallel-size 2 --tensor-model-parallel-size 4", "parallel.tp", 4),
        ("--sequence-parallel", "parallel.sequence_parallel", False),
        ("--recompute-activations", "training.recompute", "selective"),
        ("--use-megatron-fsdp", "parallel.zero", 3),
        ("--use-rotary-position-embeddings", "model.position", "rotary"),
        ("--group-query-attention --num-query-groups 4", "model.kv_heads", 4),
        (
            "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 3 --global-batch-size 16",
            "parallel.vpp",
            2,
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*13|t*11,L'",
            "parallel.first_stage_layers",
            13,
        ),
        ("--expert-model-parallel-size 1 --optimizer adam", "parallel.tp", 1),
        ("--squared-relu", "model.activation", "relu2"),
        ("--add-qkv-bias --disable-bias-linear", "model.bias", "qkv"),
        ("--window-size 127,0", "model.attention_window", 128),
        ("--window-size '(127,0)'", "model.attention_window", 128),
        ("--mtp-num-layers 2", "model.mtp_layers", 2),
        ("--num-experts 8", "model.experts", 8),
        (BESIDE, "training.moe_overlap", True),
        ("--cuda-graph-impl full_iteration", "training.runtime", "megatron-core-graphs"),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", "training.runtime", "megatron-core-graphs"),
        ("--cuda-graph-impl local --cuda-graph-scope attn", "training.runtime", "megatron-core"),
        (f"{BESIDE} --cuda-graph-impl full_iteration", "training.moe_dispatcher", "alltoall"),
        (f"{BESIDE} --delay-wgrad-compute", "training.moe_overlap", True),
        (FIXED, "training.moe_capacity", 4.0),
        (f"{FIXED} --moe-paged-stash", "training.moe_stash", 1.1),
        (f"{FIXED} --moe-paged-stash --moe-paged-stash-buffer-size-factor-cuda 1.5", "training.moe_stash", 1.5),
        (f"{EXPERTS} --moe-router-force-load-balancing", "training.moe_load", 1.0),
        ("--num-experts 8", "model.experts_per_token", 2),
        ("--num-experts 8", "training.moe_load_balancing", "micro_batch"),
        ("--num-experts 8", "training.moe_aux_loss_coeff", 0.0),
        ("--num-experts 8", "model.router_renormalize", True),
        ("--num-experts 8 --moe-router-pre-softmax", "model.router_renormalize", False),
        ("--num-experts 8 --moe-router-topk 1 --moe-router-score-function sigmoid", "model.router_renormalize", False),
        ("--num-experts 8 --moe-layer-freq ([0]*3+[1]*21)", "model.dense_layers", 3),
        ("--num-experts 8 --moe-layer-freq [0,1]*12", "model.moe_layer_every", 2),
        ("--num-experts 8 --moe-layer-freq 1", "model.dense_layers", 0),
        (
            "--num-experts 8 --moe-router-topk 4 --moe-router-score-function sigmoid "
            "--moe-router-num-groups 4 --moe-router-group-topk 2",
            "model.router_groups",
            4,
        ),
        ("--num-experts 8 --moe-expert-capacity-factor -1", "model.experts", 8),
        ("--num-experts 0 --bf16", "model.experts", None),
        ("--num-experts 8 --tensor-model-parallel-size 2 --sequence-parallel", "parallel.etp", 2),
        (
            "--num-experts 8 --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
            "parallel.etp",
            1,
        ),
        (f"{LATENT} --q-lora-rank 48", "model.q_lora_rank", 48),
        (LATENT, "model.kv_lora_rank", 32),
        (LATENT, "model.qk_nope_head_dim", 128),
        (f"{LATENT} --qk-layernorm", "model.qk_norm", False),
        (f"{LATENT} --rope-type rope --rotary-scaling-factor 40", "model.yarn_scaling", None),
        (f"{LATENT} --rotary-scaling-factor 40", "model.attention_scale", None),
        # DeepSeek-V3's: (0.1 ln 40 + 1)^2 / sqrt(192)
        (
            f"{LATENT} --rotary-scaling-factor 40 --mscale 1 --mscale-all-dim 1",
            "model.attention_scale",
            pytest.approx(0.1352337788608801, abs=1e-15),
        ),
    ],
)
def test_a_flag_is_read(flags: str, setting: str, value: object) -> None:
    table, key = setting.split(".")
    assert getattr(getattr(read_plan(flags).job, table), key) == value


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        ("--moe-latent-size 64 --num-experts 8", "--moe-latent-size"),
        ("--moe-router-topk 4", "--moe-router-topk"),
        ("--kv-lora-rank 64", "--kv-lora-rank"),
        ("--num-experts 8 --moe-router-topk 1", "--moe-router-topk"),
        ("--num-experts 8 --delay-wgrad-compute", "--delay-wgrad-compute"),
        (
            "--num-experts 8 --overlap-moe-expert-parallel-comm --moe-shared-expert-overlap",
            "--moe-shared-expert-overlap",
        ),
        ("--num-experts 8 --moe-expert-capacity-factor 1.25", "--moe-expert-capacity-factor"),
        ("--num-experts 8 --moe-pad-expert-input-to-capacity", "--moe-pad-expert-input-to-capacity"),
        ("--num-experts 8 --moe-router-load-balancing-type sinkhorn", "--moe-router-load-balancing-type"),
        ("--num-experts 8 --moe-router-load-balancing-type aux_loss seq_aux_loss", "--moe-router-load-balancing-type"),
        ("--num-experts 8 --moe-router-score-function sqrtsoftplus", "--moe-router-score-function"),
        (
            "--num-experts 8 --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2",
            "--moe-router-group-topk",
        ),
        ("--num-experts 8 --moe-layer-freq 2", "--moe-layer-freq"),
        ("--num-experts 8 --moe-layer-freq [0]*24", "--moe-layer-freq"),
        ("--num-experts 8 --moe-layer-freq [1]*23", "--moe-layer-freq"),
        ("--num-experts 8 --moe-layer-freq ([1]*2", "--moe-layer-freq"),
        ("--num-experts 8 --moe-layer-freq ([1]*99999)*99999", "--moe-layer-freq"),
        ("--num-experts eight", "--num-experts"),
        (
            "--num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type flex "
            "--moe-flex-dispatcher-backend ncclep",
            "--moe-flex-dispatcher-backend",
        ),
        ("--multi-latent-attention --group-query-attention --num-query-groups 2", "--group-query-attention"),
        ("--some-new-parallel-size 2", "--some-new-parallel-size"),
        ("--optimizer sgd", "--optimizer"),
        ("--tensor-model-parallel-size two", "--tensor-model-parallel-size"),
        ("--tensor-model-parallel-size", "--tensor-model-parallel-size"),
        ("--position-embedding-type yarn", "--position-embedding-type"),
        ("--recompute-granularity selective --recompute-modules mhc", "--recompute-modules"),
        ("--recompute-granularity full --recompute-method block", "--recompute-method"),
        (
            "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-layout EtL",
            "--num-virtual-stages-per-pipeline-rank",
        ),
        ("--num-layers-per-virtual-pipeline-stage 7", "--num-layers-per-virtual-pipeline-stage"),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*4|t*4L'",
            "--pipeline-model-parallel-layout",
        ),
        ("--sequence-parallel --tensor-model-parallel-size x", "--tensor-model-parallel-size"),
        ("--checkpoint-activations", "--checkpoint-activations"),
        ("--no-position-embedding", "--no-position-embedding"),
        ("--padded-vocab-size 1000", "--padded-vocab-size"),
        ("--padded-vocab-size 50305 --tensor-model-parallel-size 2", "--padded-vocab-size"),
        ("--step-batch-size-schedule 0:8 --global-batch-size 8", "--step-batch-size-schedule"),
        ("--step-batch-size-schedule many", "--step-batch-size-schedule"),
        ("--lr-warmup-fraction 0.1 --lr-warmup-iters 3", "--lr-warmup-fraction"),
        ("--transformer-impl inference_optimized", "--transformer-impl"),
        (
            "--use-distributed-optimizer --num-distributed-optimizer-instances two",
            "--num-distributed-optimizer-instances",
        ),
        ("--window-size 4,4", "--window-size"),
        ("--mtp-num-layers many", "--mtp-num-layers"),
        ("stray", "--from"),
        ("--bf16 'open", "--from"),
    ],
)
def test_a_flag_that_cannot_be_planned_is_an_error(flags: str, where: str) -> None:
    with pytest.raises(InputError) as caught:
        read_megatron(f"{SHAPE} {flags}")
    assert where in [issue.where for issue in caught.value.issues]


def test_the_flags_of_megatron_s_own_example_are_planned() -> None:
    """examples/gpt3/train_gpt3_175b_distributed.sh of Megatron-LM, its variables filled in."""
    text = """torchrun --nproc_per_node 8 --nnodes 16 --master_addr host --master_port 6000 \
        pretrain_gpt.py \
        --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 \
        --max-position-embeddings 2048 --attention-backend auto --micro-batch-size 1 \
        --rampup-batch-size 16 16 5859375 --global-batch-size 1536 --train-iters 500000 \
        --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 \
        --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 \
        --lr-warmup-fraction .001 --lr-decay-iters 430000 --tensor-model-parallel-size 8 \
        --pipeline-model-parallel-size 16 --data-path text --vocab-file v.json \
        --merge-file m.txt --split 949,50,1 --log-interval 100 --save-interval 10000 \
        --eval-interval 1000 --save out --load out --eval-iters 10 --tensorboard-dir tb"""
    vocabulary = {"model.vocab": 50257}  # the tokenizer's
    settings, warnings = read_megatron(text, vocabulary)
    job = load_plan(None, {**settings, **vocabulary}).job
    assert (job.world_size, job.sizes) == (128, {"tp": 8, "cp": 1, "dp": 1, "pp": 16})
    assert (job.num_microbatches, job.training.dtype) == (1536, "fp16")
    assert job.training.learning_rate == 6e-5
    assert job.training.warmup_steps == 430
    apart, changes = (warning.message for warning in warnings)
    assert apart.startswith("--data-path, --vocab-file, --merge-file, --split, --save-interval, ")
    assert changes.startswith("--rampup-batch-size 16 16 5859375: ")


def test_a_layout_that_no_other_settings_give_is_one_of_its_own() -> None:
    layout = "--pipeline-model-parallel-layout 'Et*4|t*2|t*3|t*3L'"
    settings, _ = read_megatron(f"{SHAPE} --pipeline-model-parallel-size 4 {layout} --num-layers 12")
    assert settings["parallel.pipeline_layout"] == "Et*4|tt|t*3|t*3L"
    plan = load_plan(None, {**settings, "cluster.gpus_per_node": 4})
    assert [sum(stop - start for start, stop in chunks) for chunks in plan.stages or ()] == [4, 2, 3, 3]


@pytest.mark.parametrize("text", ["Et*4|(t*4|)*2t*3|t*2|(t|)*2mL", "Et*3|t*5|m|L", "E|(t*9|)*2L"])
def test_an_explicit_layout_returns_from_its_flags(text: str) -> None:
    layout = parse_layout(text)
    shape = {"model.layers": layout.layers, "model.mtp_layers": layout.predictions, "model.vocab": 50257}
    plan = plan_of({**shape, "parallel.pp": 4, "parallel.pipeline_layout": text})
    text = emit_plan(plan, "megatron").text
    assert "--num-virtual-stages-per-pipeline-rank" not in text
    settings, _ = read_megatron(text)
    assert parse_layout(str(settings["parallel.pipeline_layout"])).parts == layout.parts


def test_a_number_that_is_zero_is_not_the_default() -> None:
    with pytest.raises(InputError, match=r"model\.kv_heads"):
        read_plan("--group-query-attention --num-query-groups 0")


def test_flags_that_are_not_read_are_named_by_what_they_change() -> None:
    flags = "--log-interval 10 --save ckpt --optimizer-cuda-graph"
    apart, changes = read_megatron(f"{SHAPE} {flags}").warnings
    assert (apart.rule, changes.rule) == ("megatron-flags", "megatron-changes")
    assert apart.message.startswith("--log-interval, --save: ")
    assert changes.message.startswith("--optimizer-cuda-graph: ")


@pytest.mark.parametrize(
    "flags",
    [
        "--apply-layernorm-1p",
        "--rotary-seq-len-interpolation-factor 4",
        "--optimizer-cuda-graph",
        "--fp8-param-gather",
        "--loss-scale 1024",
        "--attention-softmax-in-fp32",
        "--ddp-bucket-size 5000000",
    ],
)
def test_a_flag_of_model_memory_or_speed_is_never_said_to_change_nothing(flags: str) -> None:
    (warning,) = read_megatron(f"{SHAPE} {flags}").warnings
    assert warning.rule == "megatron-changes" and warning.message.startswith(f"{flags}: ")


@pytest.mark.parametrize(
    "flags",
    [
        "--megatron-fsdp-main-params-dtype fp32",
        "--exp-avg-dtype fp32",
        "--optimizer adam",
        "--num-distributed-optimizer-instances 1",
        "--activation-offload-fraction 1",
        "--position-embedding-type rope --no-position-embedding",
    ],
)
def test_a_flag_that_says_what_is_so_without_it_is_not_named(flags: str) -> None:
    assert not read_megatron(f"{SHAPE} {flags}").warnings


@pytest.mark.parametrize(
    ("flags", "where", "settings"),
    [
        ("--bf16 --fp8-format hybrid --fp8-recipe blockwise", "--fp8-recipe", {"training.fp8_recipe": "tensorwise"}),
        ("--bf16 --fp8-format e4m3", "--fp8-format", {"training.dtype": "fp8", "training.fp8_amax_history_len": 1}),
        (
            "--bf16 --fp8-format hybrid --fp8-amax-history-len 64",
            "--fp8-amax-compute-algo",
            {"training.fp8_amax_history_len": 64},
        ),
        ("--bf16 --fp8-format hybrid --fp8-recipe mxfp8", "--fp8-format", {"training.dtype": "mxfp8"}),
        ("--transformer-impl local", "--transformer-impl", {"model.attention": "unfused"}),
        (
            "--use-distributed-optimizer --overlap-grad-reduce",
            "--overlap-grad-reduce",
            {"parallel.overlap_gradients": True},
        ),
        (
            "--step-batch-size-schedule '0:768 250B:1536 500B:3072'",
            "--step-batch-size-schedule",
            {"training.global_batch_size": 3072},
        ),
        ("--train-samples 6400", "--train-samples", {"parallel.tp": 1}),
        ("--no-gradient-accumulation-fusion", "--no-gradient-accumulation-fusion", {"parallel.zero": 0}),
        ("--lr-warmup-fraction 0.1", "--lr-warmup-fraction", {"training.warmup_steps": 0}),
        (f"{EXPERTS} --moe-permute-fusion --moe-router-dtype fp32", "--moe-grouped-gemm", {"model.experts": 8}),
        (f"{EXPERTS} --moe-grouped-gemm --moe-router-dtype fp32", "--moe-permute-fusion", {"model.experts": 8}),
        (f"{EXPERTS} --moe-grouped-gemm --moe-permute-fusion", "--moe-router-dtype", {"model.experts": 8}),
        (f"{LATENT}", "--qk-layernorm", {"model.attention_kind": "mla"}),
    ],
)
def test_flags_planned_as_the_nearest_setting_are_reported(flags: str, where: str, settings: dict[str, object]) -> None:
    read = read_megatron(f"{SHAPE} {flags}")
    assert settings.items() <= dict(read.settings).items()
    assert [(w.rule, w.where) for w in read.warnings] == [("megatron-nearest", where)]
    assert not read_megatron(f"{SHAPE} --overlap-grad-reduce").warnings


INSTANCES = "--use-distributed-optimizer --num-distributed-optimizer-instances"


@pytest.mark.parametrize(
    ("ranks", "size"),
    [
        ({"cluster.nodes": 2, "cluster.gpus_per_node": 8}, 4),  # 16 ranks / tp 2 / 2 instances
        ({"cluster": "dgx-2x8"}, 4),
        ({"cluster.gpus_per_node": 8}, 2),
        ({"parallel.dp": 12}, 6),
        ({"cluster": "dgx-2x8", "parallel.tp": 4}, 2),
    ],
)
def test_instances_of_the_optimizer_cut_the_ranks_of_mpctls_command_line(ranks: dict[str, object], size: int) -> None:
    text = f"{SHAPE} --tensor-model-parallel-size 2 {INSTANCES} 2"
    read = read_flags("megatron", text, ranks)
    assert (read.settings["parallel.zero_size"], read.warnings) == (size, ())
    torchrun = f"torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py {text}"
    assert read_flags("megatron", torchrun).settings["parallel.zero_size"] == 4
    warnings = {warning.rule for warning in read_flags("megatron", text).warnings}
    assert warnings == {"megatron-nearest", "from-world"}


@pytest.mark.parametrize("count", ["0", "-1", "3", "16", "nan", "2.0", "1e999"])
def test_instances_that_cannot_cut_the_replicas_are_refused(count: str) -> None:
    ranks = {"cluster.nodes": 1, "cluster.gpus_per_node": 8}
    with pytest.raises(InputError, match="--num-distributed-optimizer-instances"):
        read_flags("megatron", f"{SHAPE} {INSTANCES} {count}", ranks)
    if count in ("0", "-1"):
        with pytest.raises(InputError, match=f"{count} is not 1 or more"):
            read_flags("megatron", f"{SHAPE} {INSTANCES} {count}")
    with pytest.raises(InputError, match="add --use-distributed-optimizer"):
        read_flags("megatron", f"{SHAPE} --num-distributed-optimizer-instances 2", ranks)


def test_experts_are_cut_as_tp_where_their_flag_is_missing() -> None:
    flags = f"{GROUPED} --tensor-model-parallel-size 4 --sequence-parallel"
    (warning,) = read_megatron(f"{SHAPE} {flags} --moe-token-dispatcher-type alltoall").warnings
    assert (warning.rule, warning.where) == ("megatron-default", "--expert-tensor-parallel-size")
    assert "takes tp: etp 4 is planned" in warning.message
    dense = read_megatron(f"{SHAPE} --tensor-model-parallel-size 4")
    assert "parallel.etp" not in dense.settings


@pytest.mark.parametrize(
    ("flags", "dispatcher"),
    [
        ("--moe-token-dispatcher-type alltoall", None),
        ("", "allgather"),
        ("--moe-token-dispatcher-type flex --moe-enable-deepep", "deepep"),
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep", "hybridep"),
    ],
)
def test_how_tokens_are_sent(flags: str, dispatcher: str | None) -> None:
    flags = f"{GROUPED} --expert-model-parallel-size 2 {flags}"
    settings, warnings = read_megatron(f"{SHAPE} {flags}")
    assert (settings.get("training.moe_dispatcher"), warnings) == (dispatcher, ())
    written = emit_plan(read_plan(flags), "megatron").text
    assert read_megatron(written).settings.get("training.moe_dispatcher") == dispatcher


def test_a_layout_of_experts_is_read_for_a_model_named_elsewhere() -> None:
    flags = "--micro-batch-size 1 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
    settings, _ = read_megatron(flags)
    plan = load_plan(
        None,
        {
            **settings,
            **MIXTURE,
            "model.layers": 4,
            "model.hidden": 64,
            "model.heads": 4,
            "model.vocab": 1000,
            "model.seq_length": 64,
            "cluster.gpus_per_node": 8,
        },
    )
    assert plan.job.expert_sizes == {"etp": 1, "ep": 4, "edp": 2, "pp": 1}


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"model.experts_per_token": 1}, "model.router_renormalize"),
        ({"model.router_score": "sigmoid", "model.router_renormalize": False}, "model.router_renormalize"),
        (
            {"model.router_groups": 4, "model.router_groups_per_token": 2, "model.router_score": "sigmoid"},
            "model.router_groups_per_token",
        ),
        ({"model.bias": True}, "model.bias"),
        (
            {
                **LATENT_SHAPE,
                "model.experts": None,
                "model.experts_per_token": 1,
                "model.expert_ffn": None,
                "model.bias": True,
            },
            "model.bias",
        ),
        ({**LATENT_SHAPE, "model.norm": "layernorm"}, "model.norm"),
        ({**LATENT_SHAPE, "model.attention_scale": 0.5}, "model.attention_scale"),
        (
            {**LATENT_SHAPE, "model.yarn_scaling": {"factor": 40.0, "original_max_position": 8192.0}},
            "model.yarn_scaling",
        ),
        ({"model.yarn_scaling": {"factor": 40.0, "original_max_position": 4096.0}}, "model.yarn_scaling"),
        (
            {
                "parallel.order": "tp-cp-dp-ep-pp",
                "parallel.ep": 2,
                "parallel.tp": 2,
                "parallel.sequence_parallel": True,
            },
            "parallel.order",
        ),
        ({"parallel.ep": 8, "parallel.zero": 1, "parallel.zero_size": 4}, "parallel.zero_size"),
    ],
)
@pytest.mark.parametrize("target", ["megatron", "megatron-bridge"])
def test_experts_that_megatron_cannot_have(settings: Settings, where: str, target: str) -> None:
    with pytest.raises(InputError) as caught:
        emit_plan(plan_of({**MIXTURE, **settings}), target)
    (issue,) = caught.value.issues
    assert issue.where == where and issue.hint


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("[1]*3", [1, 1, 1]),
        ("([0]+[1]*2)*2", [0, 1, 1, 0, 1, 1]),
        ("[0,1]*2", [0, 1, 0, 1]),
        ("[0]+(([1])*2+[0])*2", [0, 1, 1, 0, 1, 1, 0]),
    ],
)
def test_a_pattern_of_layers(text: str, layers: list[int]) -> None:
    assert read_pattern(text) == layers == read_pattern(layer_pattern(layers))


def test_samples_are_steps_of_the_global_batch() -> None:
    flags = "--global-batch-size 64 --train-samples 6432 --lr-decay-samples 5120 --lr 1e-4"
    job = read_plan(f"{flags} --lr-warmup-samples 640").job
    assert (job.training.steps, job.training.lr_decay_steps) == (100, 80)
    assert job.training.warmup_steps == 10
    assert read_plan(f"{flags} --lr-warmup-fraction 0.05").job.training.warmup_steps == 4
    assert not read_megatron(f"{SHAPE} {flags}").warnings


def test_layers_of_megatron_s_own_hold_their_scores() -> None:
    flags = "--tensor-model-parallel-size 2 --bf16 --hidden-dropout 0 --attention-dropout 0"
    kept = [activations(read_plan(f"{flags} --transformer-impl {name}")) for name in ("local", "transformer_engine")]
    assert kept[0] - kept[1] > 2 * 24 * 2 * 8 * 1024**2  # bf16 scores of layers, batch, heads


@pytest.mark.parametrize(("hidden", "ffn"), [(768, 2048), (1024, 2688), (4096, 10880), (5120, 13632), (8192, 21824)])
def test_the_width_of_swiglu_is_megatron_s(hidden: int, ffn: int) -> None:
    """int(4 h 2/3 / 64) x 64 of validate_args: 8/3 x 768 = 2048, 8/3 x 1024 = 2730 and 42 x 64."""
    flags = f"--swiglu --hidden-size {hidden}"
    job = read_plan(flags).job
    assert job.model is not None and (job.model.ffn, job.model.activation) == (ffn, "swiglu")
    assert dict(read_megatron(f"{SHAPE} {flags} --ffn-hidden-size 512").settings)["model.ffn"] == 512
    assert dict(read_megatron(f"{SHAPE} --hidden-size {hidden}").settings).get("model.ffn") is None


@pytest.mark.parametrize("vocab", ["--vocab-size 50257", ""])
def test_a_padded_vocabulary_is_the_rows_of_the_word_table(vocab: str) -> None:
    shape = SHAPE.replace("--vocab-size 50257", vocab)
    flags = f"{shape} --tensor-model-parallel-size 4 --padded-vocab-size 50304"
    job = load_plan(None, {**read_megatron(flags).settings, "cluster.gpus_per_node": 8}).job
    assert job.model is not None
    rows = padded_vocab(job.model.vocab, tp=4, divisor=job.model.vocab_divisor)
    assert (job.model.vocab, rows) == (50257 if vocab else 50304, 50304)


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        ("--num-layers $LAYERS --lr ${LR}", {"--num-layers", "--lr"}),
        ("${GPT_MODEL_ARGS[@]} --lr 1e-4", {"--from"}),
        ("--data-path $DATA ${EVAL_ARGS[@]}", {"--from"}),
        ("--no-load-optim $MORE", {"--from"}),
        ("--train-data-path a $MORE", {"--from"}),
    ],
)
def test_a_shell_s_variables_are_said_to_need_a_shell(flags: str, where: set[str]) -> None:
    with pytest.raises(InputError, match="is for a shell to expand") as caught:
        read_megatron(f"torchrun --nnodes $NODES ${{DISTRIBUTED[@]}} pretrain_gpt.py {flags}")
    assert {issue.where for issue in caught.value.issues} == where
    assert all("write its value there" in issue.hint for issue in caught.value.issues)
    assert read_megatron(f"torchrun ${{D[@]}} --nnodes 2 p.py {SHAPE} --save $OUT").settings


def test_a_flag_without_a_value_takes_none() -> None:
    with pytest.raises(InputError, match="'stray' belongs to no flag"):
        read_megatron(f"{SHAPE} --no-load-optim stray")


def test_attention_dropout_is_drawn_in_transformer_engine_s_kernels() -> None:
    """Megatron's default is 0.1: under flash attention no scores are kept, under unfused all."""
    flags = "--tensor-model-parallel-size 2 --bf16 --seq-length 4096 --max-position-embeddings 4096"
    device = {"cluster": "dgx-a100", "cluster.nodes": 1}
    dropped, plain = (read_plan(flags, **device), read_plan(f"{flags} --attention-dropout 0", **device))
    assert dropped.job.training.attention_dropout == 0.1
    assert activations(dropped) == activations(plain)
    written_out = read_plan(f"{flags} --attention-backend unfused", **device)
    scores = 24 * 2 * 8 * 4096**2  # layers, micro batch, heads of a rank, pairs
    assert activations(written_out) - activations(plain) > 4 * scores
    assert step_seconds(plain) < step_seconds(dropped) < step_seconds(written_out)


def activations(plan: Plan) -> float:
    """Bytes that a rank keeps for backward."""
    assert plan.estimate is not None
    return plan.estimate.memory[0].activation_bytes


def step_seconds(plan: Plan) -> float:
    assert plan.estimate is not None and plan.estimate.step_seconds is not None
    return plan.estimate.step_seconds
