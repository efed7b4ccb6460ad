"""How a model is trained: batches, precision, optimizer, recomputation."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from mpctl.core.units import DTYPE_BYTES
from mpctl.spec.adapter import AdapterSpec
from mpctl.spec.base import (
    BatchRanges,
    Count,
    CountOrZero,
    DType,
    Hyper,
    PositiveHyper,
    Probability,
    StrictModel,
    rising_ranges,
)
from mpctl.spec.muon import MuonSpec
from mpctl.spec.presets import bundled_names, find_file, name_or_path, preset_names

RecomputeMode = Literal["none", "selective", "full"]
RecomputeModule = Literal["core_attn", "mla_up_proj", "moe_act", "shared_experts", "layernorm", "mlp"]
Dispatcher = Literal["rows", "alltoall", "allgather", "deepep", "hybridep"]
"""How tokens are sent to their experts (plan/estimate/expert_messages.py): `rows` as mpctl does it."""


DEFAULT_RUNTIME = "mpctl"
"""The profile of the software that `mpctl launch` starts; that of a job that names none."""

CORE: RecomputeModule = "core_attn"
"""The module of recompute_modules that every runtime with selective recomputation has."""

Optimizer = Literal[
    "adamw",
    "adamw-8bit",
    "paged-adamw-8bit",
    "adamw-4bit",
    "adafactor",
    "sgd",
    "lion",
    "lion-8bit",
    "paged-lion-8bit",
    "muon",
]
CrossEntropy = Literal["unfused", "fused", "te", "linear"]
"""Megatron's --cross-entropy-loss-fusion and its implementations."""
LOSS_KEYS = ("training.cross_entropy", "training.cross_entropy_chunks")
"""Settings that a script of one software says of it alone: another has its own way."""

Load = Annotated[float, Ge(1), Le(2**16)]
"""A largest load over the mean of all."""


def _known_runtime(name: str) -> str:
    """The name or the path of a runtime preset; the error lists all names, as pydantic does for a
    Literal."""
    if name not in bundled_names("runtimes") and find_file("runtimes", name) is None:
        names = preset_names("runtimes")
        *others, last = (f"'{known}'" for known in names)
        expected = f"{', '.join(others)} or {last}" if others else last
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
    return name


def _list_runtimes(schema: dict[str, Any]) -> None:
    """Add the names of all runtime presets to the JSON schema of `runtime`."""
    schema["anyOf"] = name_or_path("runtimes")


class TrainingSpec(StrictModel):
    """How the model is trained: batches, precision, recomputation, AdamW and its learning rate
    and validation. The losses depend on this table, the model and the data, and not on
    the layout.
    """

    micro_batch_size: Count = Field(1, description="samples of one micro batch of a replica")
    global_batch_size: Count | None = Field(
        None, description="samples of one step over all replicas; micro_batch_size x dp when absent"
    )
    dtype: Literal["auto", DType] = Field(
        "auto",
        description="data type of parameters and activations; auto: bf16, or fp16, if the cluster's device "
        "has it, else fp32; tf32: fp32 with TF32 products; fp8: bf16 with 8-bit products in "
        "layers",
    )
    fp8_recipe: Literal["delayed", "tensorwise"] = Field(
        "delayed",
        description="dtype fp8: scale of a tensor by its largest element in the last steps (delayed) or now "
        "(tensorwise)",
    )
    fp8_amax_history_len: Annotated[int, Ge(1), Le(1024)] = Field(
        16, description="fp8_recipe delayed: number of last steps whose largest element counts"
    )
    gradient_dtype: DType | None = Field(
        None, description="data type in which gradients are summed; fp32 when absent (fp64 with dtype fp64)"
    )
    recompute: RecomputeMode = Field(
        "none",
        description="activations computed again in backward: none, attention's scores (selective) "
        "or everything but each layer's input (full)",
    )
    recompute_modules: list[RecomputeModule] = Field(
        default_factory=list,
        description="with recompute=selective: what is computed again; core_attn (attention's scores) when "
        "empty; all others under Megatron only",
    )
    partition_activations: bool = Field(
        False, description="with recompute=full: shard each layer's saved input over the tp ranks"
    )
    offload_activations: bool = Field(
        False, description="with recompute=full: move each layer's saved input to host memory; saves nothing on CPU"
    )
    dropout: Probability = Field(0.0, description="dropout probability of embeddings and both residual branches")
    attention_dropout: Probability = Field(
        0.0,
        description="dropout probability of attention weights; above 0 scores are held in memory, "
        "except on GPUs under the mpctl runtime",
    )
    loss_scale: Annotated[float, Ge(1e-6), Le(2.0**64)] = Field(
        2.0**16, description="fp16: loss scale at the start; it halves at each overflow"
    )
    loss_scale_window: Count = Field(
        1000, description="fp16: steps without overflow after which the loss scale doubles"
    )
    min_loss_scale: Annotated[float, Ge(1e-6), Le(2.0**64)] = Field(
        1.0, description="fp16: an overflow at or below this loss scale ends the run"
    )
    steps: Count = Field(100, description="optimizer steps to train")
    seed: Annotated[int, Ge(0), Lt(2**63)] = Field(1234, description="seed of weights, data order and dropout")
    learning_rate: PositiveHyper = Field(3e-4, description="peak learning rate, after the warm-up")
    min_learning_rate: Hyper | None = Field(
        None,
        description="learning rate at the end of the decay; when absent 3e-5, or learning_rate where that is lower",
    )
    warmup_steps: CountOrZero = Field(10, description="steps over which the learning rate rises linearly from 0")
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine",
        description="learning rate after the warm-up: constant, linear or cosine to min_learning_rate, or wsd "
        "(constant, then a decay at the end)",
    )
    lr_decay_steps: Count | None = Field(
        None,
        description="step at which the learning rate reaches min_learning_rate; steps when absent; set it to "
        "keep the rates of a run resumed with more steps",
    )
    lr_wsd_decay_steps: Count | None = Field(
        None, description="lr_schedule wsd: steps of its decay, which ends at lr_decay_steps"
    )
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = Field(
        "exponential", description="lr_schedule wsd: shape of its decay"
    )
    weight_decay: Hyper = Field(
        0.1, description="decoupled weight decay of AdamW and Lion, and SGD's; not applied to norms and biases"
    )
    beta1: Probability = Field(0.9, description="AdamW's decay of the gradient's mean")
    beta2: Probability = Field(0.95, description="AdamW's decay of the squared gradient's mean")
    epsilon: PositiveHyper = Field(1e-8, description="AdamW's epsilon")
    clip_norm: Hyper = Field(1.0, description="largest norm of the full model's gradient; 0 turns clipping off")
    mtp_loss_coeff: Hyper = Field(
        0.1,
        description="factor of the mean loss of the layers of multi-token prediction "
        "(model.mtp_layers) in the gradients",
    )
    moe_load_balancing: Literal["sequence", "global", "micro_batch", "none"] = Field(
        "sequence",
        description="experts: what the auxiliary loss balances: each sequence, the step's batch (global), "
        "each micro batch (depends on the layout), or nothing",
    )
    moe_aux_loss_coeff: Hyper = Field(
        0.01, description="factor of that loss, whose value is 1 where the load is balanced"
    )
    moe_z_loss_coeff: Hyper = Field(
        0.0, description="experts: factor of the router's z-loss (ST-MoE, arXiv 2202.08906)"
    )
    moe_bias_update_rate: Hyper = Field(
        1e-3, description="model.router_bias: by how much an expert's bias changes after each step (DeepSeek-V3)"
    )
    moe_load: Load | None = Field(
        None,
        description="experts: rows of the fullest rank of experts over the mean, for plans; when absent, time "
        "is planned for random routing and memory for 1.2",
    )
    moe_dispatcher: Dispatcher | None = Field(
        None,
        description="experts: how other software than mpctl sends tokens to them, for its plans; "
        "that of its profile when absent",
    )
    moe_overlap: bool = Field(
        False,
        description="experts: send one micro batch's tokens while another one is computed, forward beside backward; "
        "planned",
    )
    moe_capacity: Load | None = Field(
        None,
        description="experts: rows that the buffers of a rank of experts hold over the mean, whatever is routed there "
        "(Megatron's --moe-expert-rank-capacity-factor); what is routed when absent; planned",
    )
    moe_stash: Load | None = Field(
        None,
        description="moe_capacity: rows kept for backward over the mean, copied to pages of that room "
        "(Megatron's paged stash); moe_capacity when absent; planned",
    )
    moe_stash_host: Annotated[float, Gt(0), Le(2**16)] | None = Field(
        None,
        description="moe_stash: rows over the mean for which the host has pages, where those of the device run out; "
        "none when absent; planned",
    )
    cross_entropy: CrossEntropy | None = Field(
        None,
        description="loss over logits of all tokens, in float32 passes (unfused) or one kernel (fused; te: "
        "Transformer Engine's), or head and loss chunk by chunk without them (linear); as the runtime does when "
        "absent (mpctl: fused)",
    )
    cross_entropy_chunks: Count | None = Field(
        None, description="cross_entropy linear: chunks of a micro batch's tokens; as the runtime does when absent"
    )
    tiled_mlp: Count | None = Field(
        None,
        description="tiles of a micro batch's tokens in which each MLP is computed, and again in backward; whole when "
        "absent; planned",
    )
    init_std: PositiveHyper = Field(0.02, description="standard deviation of initial weights")
    eval_interval: CountOrZero = Field(0, description="steps between validations; 0 validates only at the end")
    eval_samples: CountOrZero = Field(32, description="samples of each validation; 0 turns validation off")
    on_nonfinite: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="at a loss or gradient norm that is not finite: stop, skip the update, or restart from "
        "the newest checkpoint without the last batches (rollback)",
    )
    on_spike: Literal["ignore", "stop", "skip", "rollback"] = Field(
        "ignore", description="at a loss that spikes: do nothing, or as for on_nonfinite"
    )
    spike_factor: Annotated[float, Gt(1), Le(1e6)] = Field(
        2.0, description="a loss above this times the median of the last ones is a spike"
    )
    spike_window: Annotated[int, Ge(2), Le(10_000)] = Field(
        32, description="updates over which that median is taken; no loss is a spike before"
    )
    max_skipped_steps: CountOrZero = Field(
        10, description="steps that may be skipped in a row by on_nonfinite and on_spike"
    )
    rollback_batches: Count = Field(
        200,
        description="number of batches, up to the one at fault, that a rollback leaves out; none "
        "from before the checkpoint",
    )
    max_rollbacks: CountOrZero = Field(3, description="rollbacks of one launch")
    skip_batches: BatchRanges = Field(
        "",
        description="batches to leave out, such as 17, 40-55; batch N is that of step N when none is left "
        "out; rollbacks add to the list",
    )
    init_from: str | None = Field(
        None,
        description="weights to start from: a Hugging Face directory, an import or a run; drawn from the seed "
        "when absent",
    )
    freeze: list[str] = Field(
        default_factory=list,
        description="parameters that are not trained, by patterns over their names such as "
        '"embedding.*" or "layers.[0-5].*"',
    )
    adapter: AdapterSpec | None = Field(
        None, description="train adapters of a frozen model (LoRA, QLoRA, DoRA); all parameters when absent"
    )
    optimizer: Optimizer = Field(
        "adamw",
        description="update rule; 8bit and 4bit: moments in blocks with a scale each; paged: states move to host "
        "memory where the device needs the room; `mpctl launch` runs adamw, sgd, lion and muon",
    )
    muon: MuonSpec = Field(default_factory=MuonSpec, description="optimizer muon: its settings")
    optimizer_dtype: Literal["fp32", "fp16", "bf16", "fp8"] | None = Field(
        None, description="data type of unquantized moments; that of the runtime when absent (mpctl: fp32)"
    )
    master_weights: bool | None = Field(
        None,
        description="whether 16-bit parameters have fp32 copies that are updated; as the runtime does "
        "when absent (mpctl: yes)",
    )
    momentum: Probability = Field(
        0.0, description="optimizer sgd: decay of its velocity (torch's momentum_buffer); 0: none"
    )
    offload_optimizer: bool = Field(
        False, description="keep moments and masters in host memory, which updates them; planned"
    )
    offload_fraction: Annotated[float, Gt(0), Le(1)] = Field(
        1.0, description="offload_optimizer: share of the parameters whose states are in host memory"
    )
    offload_overlap: bool = Field(
        False, description="offload_optimizer: copy one tensor's gradient while the host updates another"
    )
    offload_parameters: bool = Field(
        False, description="keep parameters in host memory between their uses (zero 3); planned"
    )
    runtime: Annotated[str, AfterValidator(_known_runtime)] = Field(
        DEFAULT_RUNTIME,
        description="software whose kernels, overlap and memory a plan assumes: a runtime preset "
        "(`mpctl presets` lists them)",
        json_schema_extra=_list_runtimes,
    )

    def batch_of_step(self, step: int) -> int:
        """The number of the batch that an update trains on, both from 1: batches in skip_batches
        are left out.

        By hand, skip_batches 3-4: steps 1 to 4 train on batches 1, 2, 5 and 6.
        """
        for first, last in rising_ranges(self.skip_batches):
            if step >= first:
                step += last - first + 1
        return step

    @property
    def chosen_dtype(self) -> DType:
        """`dtype` of a complete job, in which it is no longer `auto`."""
        assert self.dtype != "auto", "complete (spec/job.py) chooses it"
        return self.dtype

    @property
    def is_dtype_auto(self) -> bool:
        """Whether nobody named the data type, so that it followed from device and runtime."""
        return self.dtype == "auto" or "dtype" not in self.model_fields_set

    @property
    def is_runtime_default(self) -> bool:
        """Whether nobody named the runtime, so that a plan is of mpctl itself."""
        return "runtime" not in self.model_fields_set

    def with_auto_dtype(self, dtype: DType) -> "TrainingSpec":
        """The same with the data type that `auto` stands for, marked as chosen by `auto`."""
        named = self.model_fields_set - {"dtype"}
        return TrainingSpec.model_construct(named, **{**dict(self), "dtype": dtype})

    @property
    def repeated_modules(self) -> frozenset[str]:
        """Modules that selective recomputation computes again; empty in the other modes."""
        if self.recompute != "selective":
            return frozenset()
        return frozenset(self.recompute_modules or [CORE])

    @property
    def lowest_rate(self) -> float:
        """The learning rate at the end of the decay."""
        if self.min_learning_rate is None:
            return min(3e-5, self.learning_rate)
        return self.min_learning_rate

    @property
    def value_bytes(self) -> int:
        """Bytes of an element of parameters and activations in `dtype`; those of bf16 for dtypes of
        8 bits and fewer, which only operands of products have."""
        return max(2, DTYPE_BYTES[self.dtype])

    @property
    def reduced_bytes(self) -> int:
        """Bytes of an element of `reduced_dtype`."""
        return DTYPE_BYTES[self.reduced_dtype]

    @property
    def reduced_dtype(self) -> DType:
        """Precision in which gradients are accumulated and reduced."""
        return self.gradient_dtype or ("fp64" if self.dtype == "fp64" else "fp32")
