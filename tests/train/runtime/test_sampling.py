"""Incremental decoding against the full forward pass, and which tokens are drawn.

Logits of each position come once from one forward pass over the whole text and once position by
position through the caches; prompts of unequal lengths go in one batch. float64, 1e-10.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from mpctl.model.families import get_family
from mpctl.spec.families import PromptForm
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.train.families.implementation import Batch, FamilyModule, build_module
from mpctl.train.families.parts import padded
from mpctl.train.layers.parameters import initialise
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.runtime.sampling import (
    LoadedModel,
    TextState,
    TokenSampler,
    fill_masks,
    gather_logits,
    generate,
    make_decoder,
    make_text_states,
)
from mpctl.train.transport.group import Group
from tests.ranks import run_ranks

VOCAB, END, CPU = 61, 60, torch.device("cpu")
SHAPE: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "vocab": VOCAB, "seq_length": 48, "vocab_divisor": 16}
LLAMA = {
    "norm": "rmsnorm",
    "position": "rotary",
    "kv_heads": 2,
    "activation": "swiglu",
    "bias": False,
    "tied_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA,
    "llama-1kv": {**LLAMA, "kv_heads": 1},  # a head that two ranks share
    "latent": {
        **LLAMA,
        "attention_kind": "mla",
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    "glm": {"family": "glm"},
    "t5": {
        "family": "t5",
        "decoder_layers": 2,
        "decoder_seq_length": 16,
        "norm": "rmsnorm",
        "position": "relative",
        "bias": False,
        "relative_buckets": 8,
        "relative_max_distance": 10,
    },
    "bert": {"family": "bert"},
}
SPECIAL = {"[sop]": 58, "[MASK]": 59, "<pad>": 57}


def build(kind: str, group: Group, dtype: torch.dtype = torch.float64) -> tuple[FamilyModule, ModelSpec]:
    model = ModelSpec.model_validate({**SHAPE, **MODELS[kind]})
    module = build_module(model, TrainingSpec(init_std=0.3), ShardContext(group, dtype=dtype, device=CPU))
    initialise(module, 7)
    return module, model


def loaded_model(kind: str, group: Group) -> LoadedModel:
    return LoadedModel(*build(kind, group, torch.float32), group, CPU)


def asked(kind: str, lengths: tuple[int, ...], limit: int = 6) -> list[dict[str, Any]]:
    """A request's texts of random tokens; GLM's have two blanks each."""
    drawn = torch.Generator().manual_seed(3)
    texts: list[dict[str, Any]] = []
    for number, length in enumerate(lengths):
        tokens = torch.randint(0, 50, (length,), generator=drawn).tolist()
        masks = [1, length - 1] if kind in ("glm", "bert") else []
        for mask in masks:
            tokens[mask] = SPECIAL["[MASK]"]
        texts.append(
            {"number": number, "tokens": tokens, "limit": limit, "ends": [END], "special": SPECIAL, "masks": masks}
        )
    return texts


def form_of(family: str) -> PromptForm:
    form = get_family(family).prompt
    assert form is not None
    return form


def family_of(kind: str) -> str:
    return MODELS[kind].get("family", "gpt")


def full_logits(module: FamilyModule, model: ModelSpec, group: Group, text: TextState, fed: list[Any]) -> Tensor:
    """Logits [v] behind the last of all positions fed so far, from one forward pass."""
    rows = {name: [value for fields in fed for value in fields[name]] for name in fed[0]}
    held = {name: torch.tensor([row]) for name, row in rows.items()}
    if model.family == "t5":
        held["tokens"] = torch.tensor([text.tokens])
    held["context"] = torch.tensor([len(text.tokens)])
    local = module(Batch(torch.zeros(1), held))[:, -1]
    return gather_logits(local, group, vocab=model.vocab, padded=padded(model, group))[0]


def largest_difference(kind: str, group: Group, lengths: tuple[int, ...], steps: int) -> float:
    """Between cached and full logits, over all texts and places; tokens are drawn on the way."""
    module, model = build(kind, group)
    texts = make_text_states(form_of(family_of(kind)), asked(kind, lengths, steps))
    decoder, draw = make_decoder(module, CPU), TokenSampler(temperature=1.0, seed=11)
    fed = [[text.initial_fields()] for text in texts]
    worst = 0.0
    with torch.inference_mode():
        local = decoder.prefill(texts)
        for place in range(steps):
            whole = gather_logits(local, group, vocab=model.vocab, padded=padded(model, group))
            for row, text in enumerate(texts):
                full = full_logits(module, model, group, text, fed[row])
                worst = max(worst, float((whole[row] - full).abs().max()))
            tokens, _ = draw(whole, [text.number for text in texts], place)
            for text, token, held in zip(texts, tokens.tolist(), fed, strict=True):
                text.append(min(token, 50))  # so that no text ends
                held.append(text.next_fields())
            local = decoder.decode([held[-1] for held in fed])
    return worst


CACHED = ("gpt", "llama", "llama-1kv", "latent", "glm", "t5")
LENGTHS = {"one": (9,), "unequal": (9, 4, 13)}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", CACHED)
@pytest.mark.quick(6)
def test_incremental_decoding_equals_the_full_forward(kind: str, lengths: str) -> None:
    assert largest_difference(kind, Group(), LENGTHS[lengths], 5) < 1e-10


def _rank(rank: int, size: int) -> dict[str, Any]:
    import torch.distributed as dist

    group = Group(rank, size, dist.group.WORLD, "tp")
    worst = {kind: largest_difference(kind, group, LENGTHS["unequal"], 4) for kind in CACHED}
    return {"worst": worst, "drawn": {kind: drawn(kind, group) for kind in MODELS}}


def drawn(
    kind: str, group: Group, lengths: tuple[int, ...] = (9, 4, 13), first: int = 0, **settings: Any
) -> list[list[int]]:
    """Tokens by text: text `first + i` is the i-th of these."""
    loaded = loaded_model(kind, group)
    texts = make_text_states(form_of(family_of(kind)), asked(kind, lengths))
    for text in texts:
        text.number += first
    work = fill_masks if kind == "bert" else generate
    draw = TokenSampler(**{"temperature": 0.8, "top_k": 30, "top_p": 0.95, "seed": 5, **settings})
    found: list[list[int]] = [[] for _ in texts]
    for chosen in work(loaded, texts, draw):
        for one in chosen:
            found[one.text - first].append(one.token)
    return found


@pytest.mark.slow
def test_two_ranks_decode_and_draw_as_one() -> None:
    """Logits through the caches at tp 2, and tokens drawn there, of every family."""
    ranks = run_ranks(_rank, 2)
    assert max(ranks[0]["worst"].values()) < 1e-10
    alone = {kind: drawn(kind, Group()) for kind in MODELS}
    assert [rank["drawn"] for rank in ranks] == [alone, alone]


@pytest.mark.parametrize("kind", MODELS)
def test_a_text_does_not_depend_on_its_batch(kind: str) -> None:
    together = drawn(kind, Group())
    loaded = loaded_model(kind, Group())
    work = fill_masks if kind == "bert" else generate
    draw = TokenSampler(temperature=0.8, top_k=30, top_p=0.95, seed=5)
    for number, text in enumerate(asked(kind, (9, 4, 13))):
        (only,) = make_text_states(form_of(family_of(kind)), [text])
        chosen = [one.token for step in work(loaded, [only], draw) for one in step]
        assert chosen == together[number]
    assert drawn(kind, Group(), seed=6) != together


# ---------------------------------------------------------------- texts


def test_a_text_ends_at_its_limit_or_at_an_end_token() -> None:
    (text,) = make_text_states(form_of("gpt"), asked("gpt", (3,), limit=2))
    text.append(5)
    assert (text.finish, text.next_fields()) == (None, {"tokens": [5], "positions": [3]})
    text.append(6)
    assert (text.finish, text.num_written) == ("length", 2)
    (text,) = make_text_states(form_of("gpt"), asked("gpt", (3,)))
    text.append(END)
    assert (text.finish, text.num_written) == ("end-of-text", 0)


def test_blanks_are_filled_in_order_as_the_module_docstring_says() -> None:
    """A = x1 M x4 M; the first blank gets x2 x3, the second runs into its limit of 2."""
    told = {"number": 0, "tokens": [1, 59, 4, 59], "limit": 3, "ends": [END], "special": SPECIAL, "masks": [1, 3]}
    (text,) = make_text_states(form_of("glm"), [told])
    assert text.initial_fields() == {
        "tokens": [1, 59, 4, 59, 58],
        "positions": [0, 1, 2, 3, 1],
        "blocks": [0, 0, 0, 0, 1],
    }
    fed = []
    for token in (2, 3, END, 7, 8):
        text.append(token)
        fed.append([*(v[0] for v in text.next_fields().values())])
    assert fed == [[2, 1, 2], [3, 1, 3], [58, 3, 1], [7, 3, 2], [8, 3, 3]]
    assert text.finish is None
    text.append(9)
    assert text.finish == "length"


# ---------------------------------------------------------------- draws

SHARES = [0.5, 0.3, 0.15, 0.05]


def counts(n: int = 4000, **settings: Any) -> Counter[int]:
    logits = torch.tensor([SHARES]).log().expand(n, 4)
    tokens, _ = TokenSampler(**{"temperature": 1.0, "seed": 1, **settings})(logits, range(n), 3)
    return Counter(tokens.tolist())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, SHARES),
        ({"temperature": 0.5}, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.7}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.81}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
    ],
)
def test_words_are_drawn_with_the_probabilities_by_hand(settings: dict[str, Any], expected: list[float]) -> None:
    """Within five standard deviations of 4000 draws; words left out are never drawn."""
    n, found = 4000, counts(**settings)
    for word, share in enumerate(expected):
        bound = 5 * math.sqrt(n * share * (1 - share))
        assert abs(found[word] - n * share) <= bound, (word, found)


@pytest.mark.parametrize("settings", [{"top_p": 0.0}, {"temperature": 1e-320}])
def test_the_narrowest_choice_is_the_likeliest_word(settings: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, 1.0, 5.0, 2.0]]).expand(50, 4)
    tokens, _ = TokenSampler(**{"temperature": 1.0, **settings})(logits, range(50), 0)
    assert tokens.tolist() == [2] * 50


def test_log_probabilities_are_those_of_the_model() -> None:
    logits = torch.tensor([SHARES]).log() * 1.0 + 7
    token, share = TokenSampler(temperature=0.3, top_k=1)(logits, [0], 0)
    assert float(share) == pytest.approx(math.log(SHARES[int(token)]), abs=1e-6)


def test_logits_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(FloatingPointError, match="NaN"):
        TokenSampler()(torch.tensor([[1.0, math.nan]]), [0], 0)
