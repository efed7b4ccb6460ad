"""Sizes of the tensors that a rank saves for a micro batch: `ActivationShapes` of a layout.

By hand, gpt of 8 heads and ffn 64 on tp 2: a rank has 4 heads and 32 columns of the MLP.
"""

from __future__ import annotations

from mpctl.core.sharding import padded_vocab
from mpctl.core.tensor_grid import FEATURES
from mpctl.core.units import DTYPE_BYTES
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.activation_shapes import ActivationShapes, LocalDims
from mpctl.plan.estimate.attention import fuses_variants, kernels_of
from mpctl.plan.estimate.base_weights import adapter_shapes
from mpctl.plan.estimate.communication import Sizes, local_sizes
from mpctl.plan.estimate.loss import logit_bytes, loss_chunks
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.spec.schedules import SCHEDULES
from mpctl.spec.training import CORE


def activation_shapes(layout: JobLayout) -> ActivationShapes:
    """The sizes of the first tp rank of the layout, which has the most words of the vocabulary."""
    job, model = layout.job, layout.model
    t, p, memory = job.training, job.parallel, layout.profile.memory
    tp, cp, grid = p.tp, p.cp, layout.grid
    kernels = kernels_of(layout)
    value = t.value_bytes
    operand = 1 if kernels.keeps_narrow and DTYPE_BYTES[t.dtype] <= 1 else value
    is_added = kernels.adds_products and is_cuda(job) and operand == value
    vocab = padded_vocab(model.vocab, tp=tp, divisor=model.vocab_divisor)
    features, sizes = grid.feature_parts, local_sizes(layout)
    table_parts = grid.parts(grid.weight_axes(("vocab", "hidden"))[0])
    input_parts = tp if t.partition_activations else 1
    assumed = memory.assumes_dropout and model.attention == "unfused"
    hidden, latents = sizes["hidden"], latent_columns(model)
    dims = LocalDims(
        micro_batch=t.micro_batch_size,
        looked_up=sizes["batch"] * table_parts if grid.mode != "1d" else sizes["batch"],
        batch=sizes["batch"],
        seq=sizes["seq"],
        decoder_seq=sizes["decoder_seq"],
        hidden=hidden,
        joined=2 * hidden,
        inner=model.heads * model.v_size // features,
        queries=model.heads * model.qk_size // features,
        kv=key_value_columns(model) // features,
        heads=model.heads // features,
        head_size=model.head_size,
        ffn=model.ffn // features,
        vocab=vocab // features,
        cp=cp,
        gate=1,
        query_latent=latents[0],
        key_latent=latents[1],
        key_columns=sum(latents[1:]),
        **_experts_dims(layout, sizes),
    )
    ends = [stack.exit for stack in layout.table.stacks if layout.table.adapter]  # an adapted head
    for block in (*(block for stack in layout.table.stacks for block in stack.kinds), *ends):
        for weight in block.weights:  # which also have a family's own dimensions
            for dim, size in zip(weight.dims, weight.shape, strict=True):
                dims.setdefault(dim, size // (features if dim in FEATURES else 1))
    return ActivationShapes(
        dims=dims,
        kernels=kernels,
        is_cuda=is_cuda(job),
        fuses_variants=fuses_variants(layout),
        value=value,
        operand=operand,
        table_rows=vocab // table_parts,
        kv_heads=model.kv_heads,
        kv_copies=layout.kv_copies,
        mode=grid.mode,
        side=grid.hidden_parts,
        feature_parts=features,
        tp=tp,
        cp=cp,
        splits=p.sequence_parallel,
        is_flash=model.attention == "flash",
        dropout=t.dropout > 0 or assumed,
        attention_dropout=t.attention_dropout > 0 or assumed,
        recompute="none" if t.repeated_modules and CORE not in t.repeated_modules else t.recompute,
        input_parts=0 if t.offload_activations else input_parts,
        fetched_parts=input_parts if _fetches_ahead(layout) else 0,
        modules=t.repeated_modules - {CORE},
        adds_products=is_added and not job.launch.compile and adds_products(layout),
        sums=t.reduced_bytes,
        logit_bytes=logit_bytes(t, layout.profile, kernels),
        loss_chunks=loss_chunks(t, layout.profile),
        tiles=t.tiled_mlp or 0,
        adapter=adapter_shapes(layout),
        cp_comm=p.stated_cp_comm,
        **_router_sizes(layout),
    )


def adds_products(layout: JobLayout) -> bool:
    """Whether a matrix's gradient is a product of 16-bit operands in backward, which mpctl's
    products on an accelerator add to the step's gradient themselves."""
    is_narrow = layout.job.training.chosen_dtype in ("bf16", "fp16")
    splits = SCHEDULES[layout.job.parallel.schedule].splits_backward
    return is_narrow and not splits and layout.grid.mode == "1d"


def latent_columns(model: ModelSpec) -> tuple[int, int, int]:
    """Columns of the latent of queries, of that of keys and values, and of the keys' part with
    positions; 0 where there are none."""
    columns = (model.q_lora_rank, model.kv_lora_rank, model.qk_rope_head_dim)
    own = (columns[0] or 0, columns[1] or 0, columns[2] or 0)
    return own if model.is_mla else (0, 0, 0)


def key_value_columns(model: ModelSpec) -> int:
    """Columns of the product that computes keys and values, of all heads."""
    if model.is_mla:
        return model.heads * ((model.qk_nope_head_dim or 0) + model.v_size)
    return 2 * model.kv_heads * model.head_size


def _experts_dims(layout: JobLayout, sizes: Sizes) -> dict[str, int]:
    """The dimensions of a layer with experts on this rank; none of other models."""
    model = layout.model
    if model.experts is None:
        return {}
    return {
        "routed": sizes["routed"],
        "experts": model.experts,
        "expert_ffn": model.expert_width // layout.job.parallel.etp,
        "shared_ffn": model.shared_expert_ffn // layout.grid.feature_parts,
    }


def _router_sizes(layout: JobLayout) -> dict[str, int]:
    """Return the sizes of the router's saved tensors (train/kernels/routing.py): logits for a
    renormalized softmax, else scores; both if the balance or z loss needs the other too."""
    model, training, parallel = layout.model, layout.job.training, layout.job.parallel
    if model.experts is None:
        return {}
    is_of_logits = model.router_score == "softmax" and model.router_renormalize
    balances = training.moe_aux_loss_coeff > 0 and training.moe_load_balancing != "none"
    has_z, chosen = training.moe_z_loss_coeff > 0, model.experts_per_token
    divides = model.router_renormalize and not is_of_logits  # by a sum, of numbers that it keeps
    sums = divides + (balances and model.router_score == "sigmoid")
    return {
        "experts_per_token": chosen,
        "ep": parallel.ep,
        "etp": parallel.etp,
        "score_tensors": (is_of_logits or has_z) + (balances or not is_of_logits),
        "token_weights": chosen * (1 + divides) + sums + has_z,
    }


def _fetches_ahead(layout: JobLayout) -> bool:
    """Whether our workers fetch offloaded inputs back before they are needed."""
    job = layout.job
    return job.training.offload_activations and kernels_of(layout).fetches_ahead and is_cuda(job)


def is_cuda(job: JobSpec) -> bool:
    """Whether the job runs on accelerators, where torch's caching allocator holds the memory: as
    the job states, else by its device."""
    return job.device_kind != "cpu"
