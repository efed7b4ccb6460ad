"""New pieces for an old tokenizer, and the merges that make them."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mpctl.core.errors import InputError
from mpctl.train.data.extend import (
    EXTENSION,
    LEAST_COUNT,
    Extended,
    Pair,
    TokenizerExtension,
    check_extendable,
    extend_tokenizer,
    find_extension,
    joined,
    learn_merges,
    read_extension,
    sha256,
)
from mpctl.train.data.tokenizer import (
    encode,
    end_of_text_id,
    find_tokenizer,
    load_tokenizer,
    train_tokenizer,
    vocabulary_size,
)
from tests.train.data.languages import ENGLISH, FRENCH, sentences

OLD_TEXTS, NEW_TEXTS = sentences(ENGLISH, 400, seed=1), sentences(FRENCH, 400, seed=2)
HELD_BACK = sentences(ENGLISH, 100, seed=3), sentences(FRENCH, 100, seed=4)
ODD = ["", " ", "naïve 🙂 \x00\x7f 中文字 \t\n\n  x", "<|endoftext|> a <|end_of_text|>", "e\u0301té"]
ADDED = 120
CUT = r"'s|\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"


def ours(path: Path) -> None:
    path.write_text(train_tokenizer(OLD_TEXTS, vocab_size=400).to_str(pretty=True))


def gpt2(path: Path) -> None:
    """As older files have it: no type, merges as text, end-of-text the last entry."""
    ours(path)
    read = json.loads(path.read_text())
    model, last = read["model"], len(read["model"]["vocab"]) - 1
    del model["type"]
    model["merges"] = [" ".join(pair) for pair in model["merges"]]
    # The first id goes to the end: end-of-text, as GPT-2 has it.
    model["vocab"] = {name: (i - 1) % (last + 1) for name, i in model["vocab"].items()}
    read["added_tokens"][0]["id"] = last
    path.write_text(json.dumps(read))


def llama3(path: Path) -> None:
    """Words that are one piece are not merged, and special tokens are outside of the vocabulary."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(CUT), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=398, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(OLD_TEXTS, trainer)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    path.write_text(tokenizer.to_str())


KINDS: dict[str, Callable[[Path], None]] = {"ours": ours, "gpt2": gpt2, "llama3": llama3}


class Extension:
    """An old tokenizer and its extension."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.path, self.new_path = folder / "old.json", folder / "tokenizer.json"
        KINDS[kind](self.path)
        self.made: Extended = extend_tokenizer(self.path, NEW_TEXTS, vocab_size=400 + ADDED)
        self.new_path.write_text(self.made.text)
        self.old, self.new = load_tokenizer(self.path), load_tokenizer(self.new_path)
        self.extension = self.made.extension

    def bytes_of(self, number: int) -> int:
        """A character of a piece represents a byte."""
        return len(self.new.id_to_token(number))

    def ends(self, ids: list[int]) -> list[int]:
        return list(accumulate(map(self.bytes_of, ids)))


@pytest.fixture(scope="module", params=list(KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Extension:
    return Extension(request.param, tmp_path_factory.mktemp(request.param))


def test_every_old_entry_keeps_its_id_and_new_ones_follow(pair: Extension) -> None:
    before, after = (t.get_vocab(with_added_tokens=True) for t in (pair.old, pair.new))
    assert before.items() <= after.items()
    assert sorted(set(after.values()) - set(before.values())) == list(range(400, 400 + ADDED))
    assert end_of_text_id(pair.old) == end_of_text_id(pair.new)
    assert (vocabulary_size(pair.old), vocabulary_size(pair.new)) == (400, 400 + ADDED)


def test_only_vocabulary_and_merges_differ_in_the_file(pair: Extension) -> None:
    before, after = (json.loads(p.read_text()) for p in (pair.path, pair.new_path))
    then, now = before.pop("model"), after.pop("model")
    assert before == after
    assert now["merges"][: len(then["merges"])] == then["merges"]
    assert {k: v for k, v in then.items() if k not in ("merges", "vocab")} == {
        k: v for k, v in now.items() if k not in ("merges", "vocab")
    }


def assert_joined(pair: Extension, text: str) -> None:
    """Both are the text; the new ids end where old ones end, and where both have one piece between
    two ends it is the same."""
    (old,), (new,) = encode(pair.old, [text]), encode(pair.new, [text])
    assert pair.new.decode(new, skip_special_tokens=False) == text
    then, now = pair.ends(old), pair.ends(new)
    assert set(now) <= set(then)
    spans = dict(zip(zip([0, *then], then, strict=False), old, strict=True))
    for span, number in zip(zip([0, *now], now, strict=False), new, strict=True):
        assert number == spans[span] if number < 400 else span not in spans


def test_old_ids_are_joined_and_never_cut_elsewhere(pair: Extension) -> None:
    for text in (*ODD, *OLD_TEXTS[:20], *NEW_TEXTS[:20]):
        assert_joined(pair, text)


@settings(max_examples=50, deadline=None)
@given(st.text() | st.text(alphabet="aeélnoqrstu ' \n").map(str))
def test_any_text_comes_back(pair: Extension, text: str) -> None:
    assert_joined(pair, text)


def test_new_text_gets_shorter_and_old_text_hardly_changes(pair: Extension) -> None:
    """On held-back sentences: 120 pieces halve French (5,632 ids become 2,918; 3,681 of 6,222 with
    Llama 3's cuts); 2 % of English ids are joined, as the two share some spellings."""
    (english, french) = HELD_BACK
    lengths = [sum(map(len, encode(t, french))) for t in (pair.old, pair.new)]
    assert lengths[1] < 0.6 * lengths[0]
    old, new = (encode(t, english) for t in (pair.old, pair.new))
    kept = sum(number < 400 for ids in new for number in ids)
    assert 0.96 < kept / sum(map(len, old)) <= 1
    assert sum(a == b for a, b in zip(old, new, strict=True)) > 75  # of 100 sentences


def test_a_new_piece_spells_what_its_old_ids_spell_and_most_are_used(pair: Extension) -> None:
    """Pieces on the way to longer ones may not be; merges of a trainer would leave more."""
    pieces = pair.extension.pieces
    assert len(pieces) == ADDED
    for number, piece in enumerate(pieces, start=400):
        assert len(piece) > 1
        assert max(piece) < 400
        assert pair.new.id_to_token(number) == "".join(map(pair.old.id_to_token, piece))
    used = {number for ids in encode(pair.new, NEW_TEXTS) for number in ids if number >= 400}
    assert len(used) > 0.6 * ADDED


def test_hashes_name_both_tokenizers_bytes_repeat_and_progress_rises(pair: Extension) -> None:
    calls: list[tuple[str, int, int]] = []
    again = extend_tokenizer(
        pair.path, iter(NEW_TEXTS), vocab_size=400 + ADDED, total=400, on_progress=lambda *call: calls.append(call)
    )
    assert again == pair.made
    counted = [call for call in calls if call[0] == "count words"]
    assert counted == [("count words", i, 400) for i in range(1, 401)]
    done = [done for stage, done, total in calls if (stage, total) == ("learn pieces", ADDED)]
    assert done[-1] == ADDED
    assert done == sorted(set(done))
    assert pair.extension.old_tokenizer_sha256 == sha256(pair.path.read_bytes())
    assert pair.extension.tokenizer_sha256 == sha256(pair.new_path.read_bytes())


def test_extended_twice(pair: Extension, tmp_path: Path) -> None:
    texts = [" ".join(f"Straße{i} Übermut schön gewesen" for i in range(40))] * 3
    made = extend_tokenizer(pair.new_path, texts, vocab_size=560)
    (tmp_path / "t.json").write_text(made.text)
    latest = load_tokenizer(tmp_path / "t.json")
    assert pair.new.get_vocab().items() <= latest.get_vocab().items()
    assert made.extension.old_vocab_size == 400 + ADDED
    (ids,) = encode(latest, texts[:1])
    assert latest.decode(ids) == texts[0]


def test_a_corpus_with_less_to_learn_and_one_with_nothing(pair: Extension) -> None:
    few = extend_tokenizer(pair.path, ["ça ça ça"], vocab_size=100_000).extension
    assert 0 < len(few.pieces) < 5
    assert few.vocab_size == 400 + len(few.pieces)
    with pytest.raises(InputError, match="add more text"):
        extend_tokenizer(pair.path, ["ç"], vocab_size=500)
    with pytest.raises(InputError, match="add more text"):  # no language has such a word
        extend_tokenizer(pair.path, ["çé" * 1000], vocab_size=500)


# ---------------------------------------------------------------- bad input


def test_too_small_a_size_names_the_smallest_that_is_legal(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    ours(path)
    for size in (399, 400):
        with pytest.raises(InputError, match=r"leave no room: .* has 400 \(use 401 or more"):
            check_extendable(path, size)
    check_extendable(path, 401)


def test_other_kinds_of_bpe_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "edited.json"
    ours(path)
    text = path.read_text()
    changes: dict[str, Callable[[Any], Any]] = {
        "its pre_tokenizer does not work on bytes": lambda read: read.update(pre_tokenizer=None),
        "its decoder does not work on bytes": lambda read: read.update(decoder=None),
        "dropout is 0.1": lambda read: read["model"].update(dropout=0.1),
        "byte_fallback is True": lambda read: read["model"].update(byte_fallback=True),
        "1 of the 256 bytes": lambda read: read["model"]["vocab"].pop("ÿ"),
    }
    for found, change in changes.items():
        change(read := json.loads(text))
        path.write_text(json.dumps(read))
        with pytest.raises(InputError, match=found) as caught:
            extend_tokenizer(path, NEW_TEXTS, vocab_size=500)
        assert caught.value.issues[0].rule == "tokenizer-not-extendable"
        assert "GPT-2, Llama 3" in caught.value.issues[0].hint


def test_other_models_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    for tokenizer in (unigram, Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))):
        tokenizer.save(str(path))
        with pytest.raises(InputError, match="not BPE"):
            check_extendable(path, 500)
    path.write_text("{}")
    with pytest.raises(InputError, match="not a tokenizer"):
        check_extendable(path, 500)


def test_a_normalizer_is_obeyed(tmp_path: Path) -> None:
    """Pieces are learned on what the model will see, here capitals only."""
    path = tmp_path / "t.json"
    tokenizer = train_tokenizer(OLD_TEXTS, vocab_size=400)
    tokenizer.normalizer = normalizers.Lowercase()
    path.write_text(tokenizer.to_str())
    made = extend_tokenizer(path, [text.upper() for text in NEW_TEXTS], vocab_size=450)
    (tmp_path / "new.json").write_text(made.text)
    new = load_tokenizer(tmp_path / "new.json")
    spelled = [new.decode([number]) for number in range(400, 450)]
    assert not any(text != text.lower() for text in spelled)


EXAMPLE = TokenizerExtension(300, "0" * 64, "f" * 64, ((5, 9), (5, 9, 7)))


def test_extension_comes_back(tmp_path: Path) -> None:
    path = tmp_path / EXTENSION
    path.write_text(EXAMPLE.to_json())
    assert read_extension(path) == EXAMPLE
    assert EXAMPLE.vocab_size == 302


def test_damaged_extensions(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {"schema": "mpctl.extension/2"},
        {"old_vocab_size": "300"},
        {"old_vocab_size": 9},
        {"old_vocab_size": True},
        {"pieces": []},
        {"pieces": [[5]]},
        {"pieces": [[5, 300]]},
        {"pieces": [[5, -1]]},
        {"pieces": [[5, 1.0]]},
        {"pieces": [[True, 5]]},
        {"pieces": {"300": [5, 9]}},
        {"pieces": None},
        {"tokenizer_sha256": "../../x"},
        {"old_tokenizer_sha256": None},
    ]
    good, path = EXAMPLE.to_json(), tmp_path / EXTENSION
    texts = [json.dumps(json.loads(good) | change) for change in changes]
    for text in (*texts, "", good[:-20], "[]", "[" * 100_000, "\x00"):
        path.write_text(text)
        with pytest.raises(InputError, match="damaged") as caught:
            read_extension(path)
        assert "--extend-tokenizer" in caught.value.issues[0].hint


def test_the_extension_next_to_a_tokenizer_is_of_it_or_none(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    assert find_extension(path) is None
    (tmp_path / EXTENSION).write_text(EXAMPLE.to_json())
    assert find_extension(path) is None
    own = replace(EXAMPLE, tokenizer_sha256=sha256(b"{}"))
    (tmp_path / EXTENSION).write_text(own.to_json())
    assert find_extension(path) == own


def test_a_folder_or_a_run_names_its_tokenizer(tmp_path: Path) -> None:
    run, data = tmp_path / "run", tmp_path / "run" / "data"
    data.mkdir(parents=True)
    assert find_tokenizer(run) == run
    (data / "tokenizer.json").write_text("{}")
    assert find_tokenizer(run) == find_tokenizer(data) == data / "tokenizer.json"
    assert find_tokenizer(data / "tokenizer.json") == data / "tokenizer.json"


Words = dict[tuple[int, ...], int]


def join_new(first: int):
    """Every pair makes a new id, `first` and up."""
    made = iter(range(first, 10**9))
    return lambda left, right: next(made)


def learned(words: Words, first: int, most: int) -> list[tuple[Pair, int]]:
    return list(islice(learn_merges(words, join_new(first)), most))


def counted_again(words: Words, first: int, most: int) -> list[tuple[Pair, int]]:
    """The definition: count all pairs, join the most frequent everywhere, repeat."""
    held = [(list(word), count) for word, count in words.items()]
    merges: list[tuple[Pair, int]] = []
    for made in range(first, first + most):
        counts: Counter[Pair] = Counter()
        for word, count in held:
            for pair in pairwise(word):
                counts[pair] += count
        best = min(counts, key=lambda pair: (-counts[pair], pair), default=None)
        if best is None or counts[best] < LEAST_COUNT:
            break
        merges.append((best, made))
        held = [(joined(word, best, made), count) for word, count in held]
    return merges


def test_by_hand() -> None:
    """abc seven times, xbc twice; then `bonjour`, as in extend.py."""
    assert learned({(0, 1, 2): 7, (9, 1, 2): 2}, 10, 9) == [((1, 2), 10), ((0, 10), 11), ((9, 10), 12)]
    assert learned({(0, 6, 1, 3, 5, 4): 5}, 7, 4) == [((0, 6), 7), ((1, 3), 8), ((5, 4), 9), ((7, 8), 10)]


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.lists(st.integers(0, 3), min_size=1, max_size=9).map(tuple), st.integers(1, 9), max_size=12))
def test_the_same_as_counting_again(words: Words) -> None:
    assert learned(words, 4, 30) == counted_again(words, 4, 30)


def test_a_pair_that_stays_apart_does_not_end_the_learning() -> None:
    words = {(0, 1): 9, (2, 3): 5, (0, 1, 4): 3}
    made = join_new(10)
    found = learn_merges(words, lambda a, b: None if (a, b) == (0, 1) else made(a, b))
    assert list(found) == [((2, 3), 10), ((1, 4), 11), ((0, 11), 12)]


def test_words_of_one_letter_and_rare_pairs() -> None:
    assert learned({(7,) * 7: 1}, 10, 9) == counted_again({(7,) * 7: 1}, 10, 9)
    assert learned({(0, 1): 1, (2, 3): 1, (5,): 100}, 10, 9) == []


@pytest.mark.slow
def test_thousands_of_merges_take_seconds() -> None:
    """Recounting these 20,000 words 2,000 times would take minutes."""
    draw = random.Random(7)
    words = {tuple(draw.choices(range(60), k=draw.randint(2, 9))): draw.randint(1, 50) for _ in range(20_000)}
    began = time.process_time()
    assert len(learned(words, 97, 2000)) == 2000
    assert time.process_time() - began < 20
