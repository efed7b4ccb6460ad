"""An export tokenizes and generates in transformers as in training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mpctl.model.families import special_tokens
from mpctl.model.families.bert.hub import BERT
from mpctl.model.families.t5.hub import T5
from mpctl.spec.load import load_job
from mpctl.spec.model import ModelSpec
from mpctl.train.data.tokenizer import added_tokens, end_of_text_id, load_tokenizer, special_ids, vocabulary_size
from mpctl.train.weights.tokens import Tokens, write_tokenizer
from mpctl.train.weights.writer import export_weights, import_weights
from tests.train.weights.hub import Truth

Truths = Callable[[str], Truth]
PROMPTS = ["w1 counts 2", "w100 counts 3 w7 counts 40 w8"]


@pytest.fixture
def export(truths: Truths, data: Path, tmp_path: Path) -> Callable[[str], tuple[Path, ModelSpec]]:
    """A model with the data's tokenizer, as a run that trained on short sequences exports it."""

    def get(kind: str) -> tuple[Path, ModelSpec]:
        import_weights(truths(kind).folder, tmp_path / "ours")
        run = tmp_path / "run"
        shutil.copytree(tmp_path / "ours" / "checkpoints", run / "checkpoints")
        shutil.copy(data / "tokenizer.json", run / "tokenizer.json")
        settings = {"model.hf_config": str(truths(kind).folder), "model.seq_length": 32}
        if kind.startswith("t5"):
            settings["model.decoder_seq_length"] = 12
        job = load_job(None, settings)
        (run / "job.json").write_text(job.model_dump_json())
        written = export_weights(run, tmp_path / "hf")
        assert written.notes == ()
        return tmp_path / "hf", written.model

    return get


@pytest.fixture
def transformers() -> Any:
    """Imported where it is asked for: every worker collects every test."""
    import transformers

    return transformers


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def trained_ids(model: ModelSpec, tokenizer: Path) -> dict[str, int]:
    """The ids of these tokens in training (train/runtime/batches.py)."""
    words = vocabulary_size(load_tokenizer(tokenizer))
    names = special_tokens(model)
    return special_ids(added_tokens(tokenizer), names, vocab=model.vocab, words=words)


@pytest.mark.parametrize("kind", ["gpt2", "llama31-sharded"])
def test_a_padded_batch_generates_what_each_prompt_does_alone(
    kind: str, export: Callable[[str], tuple[Path, ModelSpec]], data: Path, transformers: Any
) -> None:
    folder, _ = export(kind)
    assert (folder / "tokenizer.json").read_bytes() == (data / "tokenizer.json").read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    ours = load_tokenizer(data / "tokenizer.json")
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    assert batch["attention_mask"][0, 0] == 0 and batch["attention_mask"][:, -1].all()
    assert tokenizer(PROMPTS).input_ids == [ours.encode(text).ids for text in PROMPTS]
    end = end_of_text_id(ours)
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == end
    assert model.generation_config.pad_token_id == model.generation_config.eos_token_id == end
    together = model.generate(**batch, max_new_tokens=8, do_sample=False)
    assert together.shape[1] == batch["input_ids"].shape[1] + 8 or end in together
    for text, found in zip(PROMPTS, together, strict=True):
        asked = tokenizer(text, return_tensors="pt")
        alone = model.generate(**asked, max_new_tokens=8, do_sample=False)[0]
        new = alone[asked["input_ids"].shape[1] :].tolist()
        assert found[batch["input_ids"].shape[1] :].tolist()[: len(new)] == new
    assert tokenizer.model_max_length == 32


def test_a_t5_generates_with_the_tokens_of_its_training(
    export: Callable[[str], tuple[Path, ModelSpec]], data: Path, transformers: Any
) -> None:
    folder, shape = export("t5")
    ids = trained_ids(shape, data / "tokenizer.json")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float64)
    for name, token in ids.items():
        assert tokenizer.convert_tokens_to_ids(name) == token
        assert tokenizer.encode(f"w1 {name}")[-2:] == [token, ids["</s>"]]
    settings = model.generation_config
    assert (settings.pad_token_id, settings.eos_token_id, settings.decoder_start_token_id) == (
        ids["<pad>"],
        ids["</s>"],
        ids["<pad>"],
    )
    assert (model.config.pad_token_id, model.config.eos_token_id) == (ids["<pad>"], ids["</s>"])
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    assert batch["attention_mask"][0, -1] == 0
    # Its cache of transformers 5 has as many layers as the encoder; this decoder has more.
    greedy = {"max_new_tokens": 6, "do_sample": False, "use_cache": False}
    together = model.generate(**batch, **greedy)
    for text, found in zip(PROMPTS, together, strict=True):
        alone = model.generate(**tokenizer(text, return_tensors="pt"), **greedy)
        assert found.tolist()[: alone.shape[1]] == alone[0].tolist()


def test_a_bert_reads_texts_and_pairs_as_its_training_does(
    export: Callable[[str], tuple[Path, ModelSpec]], data: Path, transformers: Any
) -> None:
    folder, shape = export("bert")
    ids = trained_ids(shape, data / "tokenizer.json")
    start, end, mask = ids["[CLS]"], ids["[SEP]"], ids["[MASK]"]
    assert not (folder / "generation_config.json").exists()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(data / "tokenizer.json")
    first, second = (ours.encode(text).ids for text in PROMPTS)
    asked = tokenizer(*PROMPTS)
    assert asked["input_ids"] == [start, *first, end, *second, end]
    assert asked["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert tokenizer.mask_token_id == mask
    assert tokenizer("w1 [MASK]")["input_ids"] == [start, *ours.encode("w1").ids, mask, end]
    assert len(set(map(len, tokenizer(PROMPTS, padding=True)["input_ids"]))) == 1


END = {
    "id": 1,
    "content": "</s>",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
UNIGRAM = {
    "type": "Unigram",
    "unk_id": 0,
    "byte_fallback": False,
    "vocab": [["<unk>", 0.0], ["</s>", 0.0], ["a", -1.0]],
}


def test_texts_are_framed_by_tokens_that_the_tokenizer_has(tmp_path: Path) -> None:
    """Nothing is added, so a Unigram tokenizer takes the frame; without [CLS] there is none."""
    path = tmp_path / "from.json"
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [END], "model": UNIGRAM}))
    model = load_job(None, {"model": "demo-t5"}).model
    assert model is not None
    for scheme, framed in ((T5, [2, 1]), (BERT, [2])):
        assert write_tokenizer(tmp_path, Tokens(path, {"</s>": 1}, ()), model, scheme) == []
        assert load_tokenizer(tmp_path / "tokenizer.json").encode("a").ids == framed


def test_a_tokenizer_that_takes_no_tokens_is_reported(truths: Truths, tmp_path: Path, data: Path) -> None:
    """A Unigram's ids leave no gap; a folder without a tokenizer has no special ids."""
    folder = Path(shutil.copytree(truths("bert").folder, tmp_path / "hub"))
    import_weights(folder, tmp_path / "none")
    written = export_weights(tmp_path / "none", tmp_path / "hf-none")
    assert "no tokenizer is known" in written.notes[0]
    assert not list((tmp_path / "hf-none").glob("*token*"))
    vocabulary = [["<unk>", 0.0], ["</s>", 0.0], ["a", -1.0], ["b", -2.0]]
    end = json.loads((data / "tokenizer.json").read_text())["added_tokens"][0]
    document = {
        "version": "1.0",
        "added_tokens": [{**end, "id": 1, "content": "</s>"}],
        "model": {"type": "Unigram", "unk_id": 0, "vocab": vocabulary, "byte_fallback": False},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    import_weights(folder, tmp_path / "unigram")
    written = export_weights(tmp_path / "unigram", tmp_path / "hf")
    assert written.notes == (
        "tokenizer.json lacks [CLS], [SEP], [MASK]: tokens cannot be added to a Unigram tokenizer",
    )
