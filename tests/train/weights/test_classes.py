"""BERT and T5 directories as they are found: other spellings, second copies, what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mpctl.train.transport.group import Group
from mpctl.train.weights.hub import SINGLE, open_hub
from mpctl.train.weights.names import get_scheme
from mpctl.train.weights.tokens import Tokens, token_settings
from mpctl.train.weights.writer import export_weights, hub_config, import_weights
from tests.train.runtime.tiny import column, make_trainer, train
from tests.train.weights.hub import KINDS, Truth, answer, configure, fields, issues_of, load
from tests.train.weights.test_init_from import hub_job
from tests.train.weights.test_round_trip import answer_of_ours, assert_close, built

Truths = Callable[[str], Truth]
LENGTHS = {"bert": {"model__seq_length": 32}, "t5": {"model__seq_length": 32, "model__decoder_seq_length": 12}}


@pytest.fixture
def copied(truths: Truths, tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(truths(kind).folder, tmp_path / kind))


def change(folder: Path, changed: Callable[[dict[str, torch.Tensor]], object]) -> None:
    held = load_file(folder / SINGLE)
    changed(held)
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / SINGLE)


def test_every_tensor_of_theirs_is_read(truths: Truths) -> None:
    for kind in KINDS:
        hub = open_hub(truths(kind).folder)
        pieces = [piece.name for row in hub.rows.values() for piece in row.pieces]
        assert sorted(pieces) == sorted(hub.tensors)


SECOND_COPIES = {
    "bert": {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    "t5": {
        "lm_head.weight": "shared.weight",
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    },
}
NOT_READ = {
    "bert": {"bert.embeddings.position_ids": torch.arange(32)[None]},
    "t5": {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.ones(32, 4)},
}


@pytest.mark.parametrize("kind", SECOND_COPIES)
def test_second_copies_and_buffers_may_lie_there(kind: str, truths: Truths, copied: Any) -> None:
    folder = copied(kind)
    change(
        folder,
        lambda held: held.update(
            NOT_READ[kind], **{name: held[of].clone() for name, of in SECOND_COPIES[kind].items()}
        ),
    )
    said = answer_of_ours(built(folder, Group()), fields(kind))
    assert_close(said, truths(kind).answer)


def test_norms_as_tensorflow_called_them(truths: Truths, copied: Any) -> None:
    """As in the files of google-bert."""
    folder = copied("bert")

    def rename(held: dict[str, torch.Tensor]) -> None:
        for name in [name for name in held if "LayerNorm" in name]:
            kind = {"weight": "gamma", "bias": "beta"}[name.rpartition(".")[2]]
            held[f"{name.rpartition('.')[0]}.{kind}"] = held.pop(name)

    change(folder, rename)
    assert any(name.endswith("gamma") for name in load_file(folder / SINGLE))
    said = answer_of_ours(built(folder, Group()), fields("bert"))
    assert_close(said, truths("bert").answer)


@pytest.mark.parametrize("part", ["BertModel", "BertForMaskedLM"])
def test_a_bert_without_its_heads_names_the_class_that_has_them(part: str, truths: Truths, tmp_path: Path) -> None:
    import transformers

    folder = truths("bert").folder
    getattr(transformers, part).from_pretrained(folder).save_pretrained(tmp_path)
    issues = issues_of(tmp_path)
    assert {issue.rule for issue in issues} == {"weights-missing"}
    assert all("BertForPreTraining" in issue.hint for issue in issues)
    lacking = {issue.message.split()[0].rpartition(".")[0] for issue in issues}
    words = {"cls.predictions", "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"}
    assert lacking == {"cls.seq_relationship"} | (words if part == "BertModel" else {"bert.pooler.dense"})


def test_an_untied_t5_without_its_head(copied: Any) -> None:
    """transformers 5 makes such a model of T5Config(tie_word_embeddings=False): tied, unscaled."""
    folder = copied("t5")
    configure(folder, scale_decoder_outputs=False)
    (issue,) = issues_of(folder)
    assert issue.message.startswith("lm_head.weight [310, 32] is in no file")


def test_a_config_that_we_would_compute_otherwise(copied: Any) -> None:
    folders = {kind: copied(kind) for kind in ("bert", "t5")}
    for kind, keys in (
        ("bert", {"is_decoder": True}),
        ("bert", {"position_embedding_type": "relative_key"}),
        ("bert", {"hidden_act": "silu"}),
        ("t5", {"is_encoder_decoder": False}),
        ("t5", {"feed_forward_proj": "gated-relu"}),
        ("t5", {"scale_decoder_outputs": True, "tie_word_embeddings": False}),
    ):
        path = folders[kind] / "config.json"
        text = path.read_text()
        configure(folders[kind], **keys)
        assert [issue.rule for issue in issues_of(folders[kind])] == ["hf-config"]
        path.write_text(text)


def test_the_config_names_the_tokenizer_s_special_tokens(truths: Truths) -> None:
    known = {"[PAD]": 3, "<pad>": 5, "</s>": 7, "<extra_id_0>": 9}
    for kind, ids in (
        ("bert", {"pad_token_id": 3}),
        ("t5", {"pad_token_id": 5, "eos_token_id": 7, "decoder_start_token_id": 5}),
        ("gpt2", {"bos_token_id": 7, "eos_token_id": 7}),
    ):
        model = open_hub(truths(kind).folder).model
        found = token_settings(Tokens(Path("tokenizer.json"), known, ()), get_scheme(model))
        config = hub_config(model, "F32", found)
        assert {key: value for key, value in config.items() if key.endswith("_token_id")} == ids


@pytest.mark.parametrize("kind", ["bert", pytest.param("t5", marks=pytest.mark.slow)])
def test_a_run_from_an_import_at_tp_2_goes_back(kind: str, truths: Truths, data: Path, tmp_path: Path) -> None:
    """Its first loss is that of one process from their files; they can load its result."""
    folder, run = truths(kind).folder, tmp_path / "run"
    import_weights(folder, tmp_path / "ours")
    start = {"training__init_from": str(tmp_path / "ours")}
    sizes = {"parallel__tp": 2, "cluster__gpus_per_node": 2}
    job = hub_job(data, folder, **LENGTHS[kind], **start, **sizes)
    ranks = train(job, run)
    alone = make_trainer(hub_job(data, folder, **LENGTHS[kind]), tmp_path / "alone")
    before = alone.validate()[0]
    assert column(ranks, "initial_validation_loss")[0] == pytest.approx(before, rel=1e-5)
    (run / "job.json").write_text(job.model_dump_json())
    written = export_weights(run, tmp_path / "hf")
    assert written.step == 1
    again = hub_job(data, folder, **LENGTHS[kind], training__init_from=str(run))
    trained = make_trainer(again, tmp_path / "again")
    with torch.no_grad():
        said = answer(load(tmp_path / "hf"), kind)
    assert_close(answer_of_ours(trained.model, fields(kind)), said)
    assert (said[0] - truths(kind).logits).abs().max() > 1e-3 * said[0].abs().max()
