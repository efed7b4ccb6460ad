"""Weights of mixtures of experts and latent attention, from transformers' files and back."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mpctl.core.errors import InputError
from mpctl.core.shard import Shard
from mpctl.records.checkpoint.manifest import MANIFEST, read_manifest
from mpctl.records.checkpoint.tensor_header import read_header
from mpctl.spec.load import load_job
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.train.families.implementation import Batch, FamilyModule, build_module
from mpctl.train.layers.parameters import take
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.runtime.model_weights import load_chunks
from mpctl.train.weights.hub import INDEX, SINGLE, open_hub, scale_of
from mpctl.train.weights.names import get_scheme
from mpctl.train.weights.origin import differences, open_origin
from mpctl.train.weights.reader import fill, router_biases, rows_of_pairs
from mpctl.train.weights.writer import export_weights, hub_config, import_weights
from tests.threads import run_ranks
from tests.train.layers.test_experts import Layout
from tests.train.runtime.tiny import column, make_trainer, train
from tests.train.weights.hub import EXPERTS, Truth, answer, configure, fields, issues_of, load, summed_loss
from tests.train.weights.test_init_from import hub_job

Truths = Callable[[str], Truth]
every = pytest.mark.parametrize("kind", EXPERTS)
V3 = "deepseek_v3-sharded"


def read(folder: Path, name: str, shard: Shard | None = None) -> Tensor:
    """The shard's part of our parameter of that name, float32; all of it by default."""
    hub = open_hub(folder)
    shard = shard or Shard(hub.rows[name].shape)
    tensor = torch.full(shard.local_shape, float("nan"))
    fill(hub, {name: (shard, tensor)})
    return tensor


def stored(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def rewrite(folder: Path, changed: Callable[[dict[str, Tensor]], object]) -> None:
    """The files of a directory as one, changed."""
    held = stored(folder)
    for file in [*folder.glob("*.safetensors"), *folder.glob(INDEX)]:
        file.unlink()
    changed(held)
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / SINGLE)


@pytest.fixture
def copied(truths: Truths, tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(truths(kind).folder, tmp_path / kind))


@every
@pytest.mark.quick(4)
def test_import_then_export_gives_the_same_tensors(kind: str, truths: Truths, tmp_path: Path) -> None:
    """Bit for bit, under the names that transformers saves, which loads them again."""
    truth = truths(kind)
    import_weights(truth.folder, tmp_path / "ours")
    written = export_weights(tmp_path / "ours", tmp_path / "theirs", shard_bytes=30_000)
    before, after = stored(truth.folder), stored(tmp_path / "theirs")
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert open_hub(tmp_path / "theirs").model == written.model
    with torch.no_grad():
        (logits,) = answer(load(tmp_path / "theirs"), kind)
    assert torch.equal(logits, truth.logits)


@every
def test_our_config_describes_our_model(kind: str, truths: Truths, tmp_path: Path) -> None:
    model = open_hub(truths(kind).folder).model
    (tmp_path / "config.json").write_text(json.dumps(hub_config(model, "F32", {})))
    again = load_job(None, {"model.hf_config": str(tmp_path)}).model
    assert again is not None and list(differences(model, again, tmp_path)) == []


def built(folder: Path, context: ShardContext) -> FamilyModule:
    """This rank's part of the model at `folder`, as `mpctl sample` loads it."""
    model = open_origin(folder).model
    module = build_module(model, TrainingSpec(), context)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
    load_chunks([module], model, folder)
    return module


@torch.no_grad()
def logits_of(module: FamilyModule, samples: slice = slice(None)) -> Tensor:
    rows = {name: tensor[samples] for name, tensor in fields("mixtral").items()}
    logits: Tensor = module(Batch(torch.arange(2)[samples], rows))
    return logits


@every
def test_logits_and_every_gradient_are_theirs(kind: str, truths: Truths, tmp_path: Path) -> None:
    """Their gradients are saved as weights, so that they are read as these are."""
    truth = truths(kind)
    module = built(truth.folder, ShardContext(dtype=torch.float32))
    logits = logits_of(module)
    assert (logits - truth.logits).abs().max() <= 1e-6 * truth.logits.abs().max()
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    module.loss(Batch(torch.arange(2), fields(kind)), None).backward()
    theirs = load(truth.folder)
    summed_loss(answer(theirs, kind), fields(kind)).backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    theirs.save_pretrained(tmp_path)
    for name, parameter in module.named_parameters():
        expected, found = read(tmp_path, name), parameter.grad
        assert found is not None
        found = found[: len(expected)]  # without padding of the vocabulary
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max() + 1e-8, name


def _rank(rank: int, size: int, folders: dict[str, str]) -> dict[str, tuple[Tensor, Tensor]]:
    """The logits of each model under ep 2: of this rank's sample with dp 2, and of its words with
    tp 2 and sequence parallelism."""
    said = {}
    for kind, folder in folders.items():
        made = []
        for layout in (Layout(dp=2, ep=2), Layout(tp=2, ep=2)):
            groups = layout.groups(rank)
            context = ShardContext(
                groups["tp"], groups["cp"], layout.tp > 1, torch.float32, groups=groups, expert_view=layout.view
            )
            samples = slice(rank, rank + 1) if layout.dp > 1 else slice(None)
            made.append(logits_of(built(Path(folder), context), samples))
        said[kind] = (made[0], made[1])
    return said


def test_ranks_of_ep_2_read_their_experts_and_say_the_same(truths: Truths) -> None:
    ranks = run_ranks(_rank, 2, {kind: str(truths(kind).folder) for kind in EXPERTS})
    for kind in EXPERTS:
        logits = truths(kind).logits
        for dim, layout in ((0, 0), (2, 1)):  # samples of dp, words of tp
            found = torch.cat([rank[kind][layout] for rank in ranks], dim)[..., : logits.shape[-1]]
            assert (found - logits).abs().max() <= 2e-6 * logits.abs().max(), (kind, layout)


OVER_TP = {"parallel__tp": 2, "parallel__ep": 2, "parallel__sequence_parallel": True}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(V3, {"parallel__dp": 2, "parallel__ep": 2}), pytest.param("qwen2_moe", OVER_TP, marks=pytest.mark.slow)],
)
def test_a_run_from_their_files_at_ep_2_goes_back(
    kind: str, layout: dict[str, Any], truths: Truths, data: Path, tmp_path: Path
) -> None:
    """Its first loss is that of one process, trained biases go along, and they load its result."""
    folder, run = truths(kind).folder, tmp_path / "run"
    job = hub_job(data, folder, cluster__gpus_per_node=2, **layout)
    ranks = train(job, run)
    alone = make_trainer(hub_job(data, folder), tmp_path / "alone")
    before = alone.validate()[0]
    assert column(ranks, "initial_validation_loss")[0] == pytest.approx(before, rel=1e-5)
    (run / "job.json").write_text(job.model_dump_json())
    assert export_weights(run, tmp_path / "hf").step == 1
    biases = router_biases(open_hub(tmp_path / "hf"))
    moved = [
        abs(after - before)
        for layer, values in router_biases(open_hub(folder)).items()
        for before, after in zip(values, biases[layer], strict=True)
    ]
    assert all(change == pytest.approx(1e-3, rel=1e-3) for change in moved)
    logits = logits_of(built(run, ShardContext(dtype=torch.float32)))
    with torch.no_grad():
        (said,) = answer(load(tmp_path / "hf"), kind)
    assert (logits - said).abs().max() <= 1e-6 * said.abs().max()
    assert (said - truths(kind).logits).abs().max() > 1e-3 * said.abs().max()


def test_experts_are_stacked_gate_before_up(truths: Truths) -> None:
    folder = truths("mixtral").folder
    held, up = stored(folder), read(folder, "layers.1.mlp.experts.up.weight")
    down = read(folder, "layers.1.mlp.experts.down.weight")
    assert up.shape == (4, 2, 48, 32) and down.shape == (4, 32, 48)
    block = "model.layers.1.block_sparse_moe.experts.3."
    assert torch.equal(up[3, 0], held[f"{block}w1.weight"])
    assert torch.equal(up[3, 1], held[f"{block}w3.weight"])
    assert torch.equal(down[3], held[f"{block}w2.weight"])


def test_a_rank_reads_its_experts_and_its_columns_of_them(copied: Any) -> None:
    """Rank 1 of ep 3 and of etp 2: experts 2 and 3 of 6, the last 10 of 20 columns. The files of
    other experts may be gone once the headers are read."""
    folder = copied("qwen3_moe-sharded")
    names = ("layers.1.mlp.experts.up.weight", "layers.1.mlp.experts.down.weight")
    full = [read(folder, name) for name in names]
    cut = {0: (range(2, 4),), 2: (range(10, 20),)}
    shards = [Shard(tuple(tensor.shape), cut) for tensor in full]
    hub = open_hub(folder)
    needed = {
        hub.tensors[piece.name].path
        for name in names
        for piece in hub.rows[name].pieces
        if piece.box[0].start in (2, 3)
    }
    others = set(folder.glob("*.safetensors")) - needed
    assert others
    for path in others:
        path.unlink()
    for name, shard, tensor in zip(names, shards, full, strict=True):
        part = torch.empty(shard.local_shape)
        fill(hub, {name: (shard, part)})
        assert torch.equal(part, take(shard, tensor))


def test_rows_of_rotary_columns_become_halves(truths: Truths) -> None:
    """4 heads of 8 columns without positions and 4 with them; 16 of the latent before 4 of keys."""
    folder = truths(V3).folder
    held, at = stored(folder), "model.layers.0.self_attn."
    queries = read(folder, "layers.0.attention.query_up.weight").view(4, 12, 24)
    theirs = held[f"{at}q_b_proj.weight"].view(4, 12, 24)
    assert torch.equal(queries[:, :8], theirs[:, :8])
    assert torch.equal(queries[:, 8:10], theirs[:, 8::2])
    assert torch.equal(queries[:, 10:], theirs[:, 9::2])
    keys = read(folder, "layers.0.attention.key_value_down.weight")
    theirs = held[f"{at}kv_a_proj_with_mqa.weight"]
    assert torch.equal(keys, torch.cat([theirs[:16], theirs[16::2], theirs[17::2]]))
    name = "layers.0.attention.query_up.weight"
    for rows in (range(12, 24), range(5, 23)):  # one head of tp 4, and rows of no heads
        part = read(folder, name, Shard((48, 24), {0: (rows,)}))
        assert torch.equal(part, queries.reshape(48, 24)[rows.start : rows.stop])


def test_the_order_of_pairs_is_a_permutation() -> None:
    assert rows_of_pairs(range(24), 12, 8).sort()[0].tolist() == list(range(24))


def test_correction_biases_are_kept_in_the_manifest(truths: Truths, tmp_path: Path) -> None:
    folder = truths(V3).folder
    import_weights(folder, tmp_path / "ours")
    checkpoint = tmp_path / "ours" / "checkpoints" / "step-0"
    biases = read_manifest(checkpoint).router_bias
    assert biases == router_biases(open_hub(folder))
    assert biases.keys() == {"layers.1.mlp"}  # layer 0 is dense
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(torch.tensor(biases["layers.1.mlp"]), stored(folder)[name])
    assert torch.tensor(biases["layers.1.mlp"]).abs().max() > 0.01
    document = json.loads((checkpoint / MANIFEST).read_text())
    document["router_bias"]["layers.1.mlp"].pop()
    (checkpoint / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"layers\.1\.mlp has 7 values, the model 8 experts"):
        export_weights(tmp_path / "ours", tmp_path / "theirs")


def test_a_model_without_biases_has_none(truths: Truths) -> None:
    assert router_biases(open_hub(truths("deepseek_v2").folder)) == {}


def test_biases_stay_float32_in_a_model_of_sixteen_bits(truths: Truths, tmp_path: Path) -> None:
    load(truths(V3).folder).to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    import_weights(tmp_path / "bf16", tmp_path / "ours")
    written = export_weights(tmp_path / "ours", tmp_path / "theirs")
    headers = read_header(tmp_path / "theirs" / SINGLE)
    dtypes = {name.rpartition(".")[2]: held.dtype for name, held in headers.items()}
    assert dtypes == {"weight": "BF16", "e_score_correction_bias": "F32"}
    assert written.dtype == "BF16"


def test_missing_experts_are_named_in_one_issue_a_matrix(copied: Any) -> None:
    folder = copied("olmoe")
    rewrite(
        folder,
        lambda held: [
            held.pop(f"model.layers.1.mlp.experts.{n}.{matrix}.weight")
            for n, matrix in ((2, "up_proj"), (5, "up_proj"), (0, "down_proj"))
        ],
    )
    issues = issues_of(folder)
    assert {issue.rule for issue in issues} == {"weights-missing"}
    assert [issue.message for issue in issues] == [
        "model.layers.1.mlp.experts.N.down_proj.weight of expert 0 [32, 48] is in no file",
        "model.layers.1.mlp.experts.N.up_proj.weight of experts 2, 5 [48, 32] are in no file",
    ]


def test_an_expert_more_than_the_config_says_is_named(copied: Any) -> None:
    folder = copied("olmoe")
    name = "model.layers.0.mlp.experts.6.up_proj.weight"
    rewrite(folder, lambda held: held.update({name: torch.ones(48, 32)}))
    (issue,) = issues_of(folder)
    assert issue.rule == "weights-foreign" and name in issue.message


@pytest.mark.parametrize("experts", [5000, 2**16])
def test_a_config_of_many_experts_is_refuted_by_the_router(copied: Any, experts: int) -> None:
    """It took longer than 25 s and 2 GB; the bound of the files decides, not that of the config."""
    folder = copied("olmoe")
    configure(folder, num_experts=experts)
    began = time.monotonic()
    (issue,) = issues_of(folder)
    assert issue.rule == "weights-shape" and time.monotonic() - began < 2.0
    assert f"gate.weight is [6, 32], the shape in config.json needs [{experts}, 32]" in issue.message


def test_experts_without_a_router_and_many_layers_are_counted(copied: Any) -> None:
    folder = copied("olmoe")
    configure(folder, num_experts=2**16)
    rewrite(folder, lambda held: [held.pop(name) for name in list(held) if ".mlp.gate." in name])
    (issue,) = issues_of(folder)
    assert "implies 393,2" in issue.message and "2 layers of 65,536 experts" in issue.message
    configure(folder, num_experts=6, num_hidden_layers=10_000)
    began = time.monotonic()
    (issue,) = issues_of(folder)
    assert "implies 10,000 layers, but the files hold 55 tensors" in issue.message
    assert time.monotonic() - began < 5.0
    assert issue.hint == "use the config.json that belongs to the files"


@pytest.mark.parametrize("experts", [2**16 + 1, 10**6, 10**9])
def test_more_experts_than_there_are_models_of(copied: Any, experts: int) -> None:
    folder = copied("olmoe")
    configure(folder, num_experts=experts)
    (issue,) = issues_of(folder)
    assert (issue.where, issue.rule) == ("model.experts", "bad-value")
    assert f"{experts} is not allowed" in issue.message and issue.hint == "use at most 65536"


@pytest.mark.parametrize(
    ("kind", "keys", "words"),
    [
        ("olmoe", {"num_experts_per_tok": 99}, "99 is above 6 experts"),
        ("deepseek_v3-sharded", {"n_group": 3}, "3 does not divide 8 experts"),
    ],
)
def test_a_router_that_no_job_can_run_is_refused_at_once(
    copied: Any, kind: str, keys: dict[str, int], words: str
) -> None:
    folder = copied(kind)
    configure(folder, **keys)
    issues = issues_of(folder)
    assert words in issues[0].message and "use" in (issues[0].hint or "")


def test_an_expert_twice_is_named(copied: Any) -> None:
    """In two files of which the index names one, and in one file's header."""
    folder = copied("qwen3_moe-sharded")
    hub = open_hub(folder)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    other = next(p for p in sorted(folder.glob("*.safetensors")) if p != hub.tensors[name].path)
    save_file({**load_file(other), name: torch.ones(32, 20)}, other)
    (issue,) = issues_of(folder)
    assert issue.rule == "weights-foreign" and name in issue.message
    folder = copied("olmoe")
    path = folder / SINGLE
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].decode()
    first, again = (f"model.layers.0.mlp.experts.{n}.up_proj.weight" for n in (1, 2))
    header = text.replace(f'"{again}"', f'"{first}"').encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    (issue,) = issues_of(folder)
    assert issue.rule == "weights-damaged" and f"{first} is in it twice" in issue.message


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 e4m3 and a scale for each block of 128 x 128, as DeepSeek-V3's files have them."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    scales = torch.empty(rows, columns)
    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            at = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = weight[at].abs().max() / 448
            values[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


@pytest.fixture
def fp8(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A DeepSeek-V3 whose matrices of attention and experts are fp8, and their exact products."""
    import transformers as hf

    torch.manual_seed(3)
    keys = {**EXPERTS[V3], "hidden_size": 160, "moe_intermediate_size": 144, "num_hidden_layers": 2}
    config = hf.AutoConfig.for_model("deepseek_v3", **keys)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "fp8")
    exact = dict[str, Tensor]()

    def quantize(held: dict[str, Tensor]) -> None:
        for name in [name for name in held if "_proj" in name]:
            values, scales = quantized(held[name])
            held[name], held[scale_of(name)] = values, scales
            spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            rows, columns = values.shape
            exact[name] = values.float() * spread[:rows, :columns]

    rewrite(tmp_path / "fp8", quantize)
    return tmp_path / "fp8", exact


def test_fp8_matrices_are_multiplied_by_the_scales_of_their_blocks(fp8: Any) -> None:
    folder, exact = fp8
    up = read(folder, "layers.1.mlp.experts.up.weight")
    name = "model.layers.1.mlp.experts.5."
    assert torch.equal(up[5, 0], exact[f"{name}gate_proj.weight"])
    assert torch.equal(up[5, 1], exact[f"{name}up_proj.weight"])
    # etp cuts inside of a block, at 72 of 144 rows
    shard = Shard(tuple(up.shape), {0: (range(4, 6),), 2: (range(72, 144),), 3: (range(150, 160),)})
    part = read(folder, "layers.1.mlp.experts.up.weight", shard)
    assert torch.equal(part, up[4:6, :, 72:, 150:])
    queries = read(folder, "layers.0.attention.query_up.weight")
    theirs = exact["model.layers.0.self_attn.q_b_proj.weight"]
    assert torch.equal(queries, theirs[rows_of_pairs(range(48), 12, 8)])


def test_fp8_is_imported_in_bf16_rounded_once(fp8: Any, tmp_path: Path) -> None:
    folder, exact = fp8
    import_weights(folder, tmp_path / "ours")
    export_weights(tmp_path / "ours", tmp_path / "theirs")
    held = stored(tmp_path / "theirs")
    wrong = [name for name, value in exact.items() if not torch.equal(held[name], value.bfloat16())]
    assert wrong == [] and not any(name.endswith("_scale_inv") for name in held)


def test_fp8_without_its_scales_is_refused(fp8: Any) -> None:
    folder, _ = fp8
    gone, misfit = (scale_of(f"model.layers.0.mlp.{n}_proj.weight") for n in ("up", "gate"))

    def change(held: dict[str, Tensor]) -> None:
        del held[gone]
        held[misfit] = held[misfit][:, :1]

    rewrite(folder, change)
    first, second = sorted(issues_of(folder), key=lambda issue: issue.rule)
    assert first.rule == "weights-missing" and f"{gone} [1, 2] is in no file" in first.message
    assert second.rule == "weights-shape" and f"{misfit} is F32 [1, 1]" in second.message


def test_another_quantization_is_refused_in_words(copied: Any) -> None:
    folder = copied("mixtral")
    for table in ({"quant_method": "mxfp4"}, {"quant_method": "fp8", "weight_block_size": [64, 64]}):
        configure(folder, quantization_config=table)
        (issue,) = issues_of(folder)
        assert issue.rule == "weights-dtype" and "fp8 in blocks of 128 x 128" in issue.hint
    configure(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert open_hub(folder).model.experts == 4


def test_layers_of_multi_token_prediction_are_noted_and_not_read(copied: Any, tmp_path: Path) -> None:
    folder = copied(V3)
    more = {
        "model.layers.2.eh_proj.weight": torch.ones(32, 64),
        "model.layers.2.mlp.experts.0.up_proj.weight": torch.ones(20, 32),
    }
    rewrite(folder, lambda held: held.update(more))
    assert {issue.rule for issue in issues_of(folder)} == {"weights-foreign"}
    configure(folder, num_nextn_predict_layers=1)
    written = import_weights(folder, tmp_path / "ours")
    assert written.notes == ("layer 2 of multi-token prediction, 2 tensors, is not read",)


def test_another_name_of_the_same_class_is_read(copied: Any, truths: Truths) -> None:
    """Kimi K2 is DeepSeek-V3's code under its own model_type."""
    folder = copied(V3)
    configure(folder, model_type="kimi_k2")
    assert open_hub(folder).model == open_hub(truths(V3).folder).model


ROTARY: dict[str, Any] = {
    "layers": 2,
    "hidden": 32,
    "ffn": 48,
    "heads": 4,
    "vocab": 300,
    "seq_length": 32,
    "position": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "experts": 4,
    "experts_per_token": 2,
}
MLA: dict[str, Any] = {
    **ROTARY,
    "attention_kind": "mla",
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "shared_expert_ffn": 48,
    "norm_epsilon": 1e-6,
    "router_renormalize": False,
}


def test_a_model_that_no_class_expresses_names_the_key() -> None:
    for keys, where in (
        ({**ROTARY, "expert_ffn": 20}, {"expert_ffn"}),
        ({**ROTARY, "router_score": "sigmoid"}, {"router_score"}),
        ({**ROTARY, "router_groups": 2, "dense_layers": 1}, {"router_groups", "dense_layers"}),
        ({**ROTARY, "qk_norm": True, "shared_expert_ffn": 8}, {"shared_expert_ffn"}),
        ({**MLA, "shared_expert_ffn": 50}, {"shared_expert_ffn"}),
        ({**MLA, "norm_epsilon": 1e-5}, {"norm_epsilon"}),
        ({**MLA, "moe_layer_every": 2}, {"moe_layer_every"}),
        ({**MLA, "experts": None}, {"attention_kind"}),
        ({**MLA, "attention_kind": "mha", "norm": "layernorm"}, {"norm", "shared_expert_gate"}),
    ):
        with pytest.raises(InputError) as caught:
            get_scheme(ModelSpec(**keys))
        assert {issue.where.removeprefix("model.") for issue in caught.value.issues} == where, keys
    for keys, name in (
        (ROTARY, "Mixtral"),
        ({**ROTARY, "qk_norm": "width"}, "Olmoe"),
        (MLA, "DeepseekV2"),
        ({**ROTARY, "qk_norm": True, "expert_ffn": 20, "dense_layers": 1}, "Qwen3Moe"),
    ):
        assert get_scheme(ModelSpec(**keys)).architecture == f"{name}ForCausalLM"


def test_every_tensor_of_theirs_is_read(truths: Truths) -> None:
    for kind in EXPERTS:
        hub = open_hub(truths(kind).folder)
        pieces = [piece.name for row in hub.rows.values() for piece in row.pieces]
        assert sorted([*pieces, *hub.biases.values()]) == sorted(hub.tensors)
        for row in hub.rows.values():  # the pieces fill the parameter
            assert sum(torch.Size(piece.shape).numel() for piece in row.pieces) == (torch.Size(row.shape).numel())


def test_a_tensor_of_another_shape_is_named(copied: Any) -> None:
    folder = copied("mixtral")
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    rewrite(folder, lambda held: held.update({name: held[name].T.contiguous()}))
    (issue,) = issues_of(folder)
    assert (issue.rule, issue.message) == (
        "weights-shape",
        f"{name} is [48, 32], the shape in config.json needs [32, 48]",
    )
