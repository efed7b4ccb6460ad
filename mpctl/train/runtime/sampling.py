"""The worker side of `mpctl sample`: load a model and generate texts, one token at a time.

Texts, by family:

    gpt   tokens of the prompt, then what follows
    glm   part A with its [MASK]s; then for each of them, in order, [sop] and the words of the
          blank until [eop] (train/families/glm/samples.py)
    t5    <pad>, then what the decoder writes (train/families/t5/samples.py)
    bert  the words at [MASK], all of a text filled from one forward pass

Decoding. Prompts of unequal lengths are padded on the left, so that all continue at the same
position of the cache; padding is masked, and positions count from the text's first token. So a
text's logits do not depend on the other texts of its batch. T5 pads the encoder's input on the
right, and its decoders all begin with one token.

GLM's part A attends to itself in both directions and to nothing after it: it is fed first, then
[sop]. A finished text stays in the batch until all texts have finished.

Sampling by temperature, top-k and top-p uses the Gumbel-max trick: the largest of log p + g, with g
= -log(-log u) and u uniform, is word w with probability p(w). Each u is a hash of (seed, number of
the text, step, word) (train/kernels/counter_rng.py), so a text does not depend on the layout, on the
other texts of its batch or on the device. All ranks of a tensor-parallel group gather the same
logits and so draw the same token without a broadcast.

Request and answers: rundir, SampleRequest and SampleAnswer.

Letters: b texts, s positions, v vocabulary, t tp.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mpctl.model.families import get_prompt_form
from mpctl.records.rundir.requests import PromptRequest, SampleAnswer, SampleRequest
from mpctl.spec.families import PromptForm, PromptKind
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.train.families.implementation import Batch, EncoderDecoderModule, FamilyModule
from mpctl.train.families.parts import SingleStackModule, padded
from mpctl.train.kernels.counter_rng import site_key, uniform
from mpctl.train.layers.attention import ContextCache, DecoderCaches, KeyValueCache
from mpctl.train.runtime.build import build_chunks
from mpctl.train.runtime.kernel_choice import machine_kernels
from mpctl.train.runtime.mesh import Mesh
from mpctl.train.runtime.model_weights import load_chunks
from mpctl.train.runtime.packed_base import pack_base
from mpctl.train.runtime.partition import PipelinePartition
from mpctl.train.transport.group import Group

Fields = Mapping[str, Sequence[int]]


@dataclass
class TextState:
    """One text.

    number: index of the prompt, part of each token's random seed. tokens: the prompt. limit:
    maximum number of tokens to generate. ends: tokens that end the text and are not part of it.
    start: the special token after which a blank or a decoder begins. masks: positions of the
    blanks. num_written: tokens generated so far; last_token: the last of them; blank: number of the
    blank being filled. finish: why it ended, None before: `end-of-text`, `length` or, with all
    blanks filled, `filled`.
    """

    number: int
    tokens: Sequence[int]
    limit: int
    ends: frozenset[int]
    start: int = 0
    masks: Sequence[int] = ()
    num_written: int = 0
    last_token: int = 0
    blank: int = 0
    finish: str | None = None

    def initial_fields(self) -> Fields:
        """The first input of the model: fields by name, one value per position."""
        return {"tokens": self.tokens, "positions": range(len(self.tokens))}

    def append(self, token: int) -> None:
        """Add the sampled token; may end the text."""
        if token in self.ends:
            self.finish = "end-of-text"
        else:
            self.num_written += 1
            self.last_token = token
        if self.finish is None and self.num_written == self.limit:
            self.finish = "length"

    def next_fields(self) -> Fields:
        """The next input of the model: one position; for a finished text, any valid one."""
        position = len(self.tokens) + self.num_written - 1
        return {"tokens": [self.last_token], "positions": [position]}


@dataclass
class BlankTextState(TextState):
    """GLM: fills the blanks at `masks` in part A, one after the other; `limit` applies to each.
    block: position in the blank, from 1."""

    block: int = 1

    def initial_fields(self) -> Fields:
        """Part A, and the start of the first blank."""
        a, start = len(self.tokens), self.start
        return {"tokens": [*self.tokens, start], "positions": [*range(a), self.masks[0]], "blocks": [*[0] * a, 1]}

    def append(self, token: int) -> None:
        """Add the token; after [eop], or when the blank is full, move on to the next blank."""
        self.last_token, self.block = token, self.block + 1
        is_end = token in self.ends
        self.num_written += not is_end
        if is_end or self.block > self.limit:
            self.last_token, self.block, self.blank = self.start, 1, self.blank + 1
            if self.blank == len(self.masks):
                self.finish = "filled" if is_end else "length"

    def next_fields(self) -> Fields:
        """One position of the blank that is being filled."""
        mask = self.masks[min(self.blank, len(self.masks) - 1)]
        return {"tokens": [self.last_token], "positions": [mask], "blocks": [self.block]}


@dataclass
class DecoderTextState(TextState):
    """T5: the encoder reads the prompt, and the decoder generates."""

    def initial_fields(self) -> Fields:
        """The decoder's first token."""
        return {"decoder_tokens": [self.start]}

    def next_fields(self) -> Fields:
        """The decoder's last token; the decoder counts positions itself."""
        return {"decoder_tokens": [self.last_token]}


TEXT_STATES = {
    PromptKind.CONTINUE: TextState,
    PromptKind.FILL_WORDS: TextState,
    PromptKind.FILL_BLANKS: BlankTextState,
    PromptKind.DECODE: DecoderTextState,
}


def make_text_states(form: PromptForm, prompts: Sequence[PromptRequest]) -> list[TextState]:
    """The initial states of a request's texts. form: the family's prompt form."""
    return [
        TEXT_STATES[form.kind](
            number=text["number"],
            tokens=text["tokens"],
            limit=text["limit"],
            ends=frozenset(text["ends"]),
            start=0 if form.start is None else text["special"].get(form.start, 0),
            masks=text["masks"],
        )
        for text in prompts
    ]


T = TypeVar("T")


class Decoder(Protocol):
    """Computes one batch of texts position by position, with caches."""

    def prefill(self, texts: Sequence[TextState]) -> Tensor:
        """Feed the prompts -> logits [b, v/t] of each text's next token over this rank's words."""

    def decode(self, fields: Sequence[Fields]) -> Tensor:
        """Feed one more position of each text -> logits [b, v/t] of the next token."""


class StackDecoder:
    """A batch of texts of a family of one stack. is_causal: whether a prompt's tokens attend only
    to earlier tokens (GPT) or in both directions (GLM)."""

    def __init__(self, module: SingleStackModule, device: torch.device, *, is_causal: bool) -> None:
        self.module, self.device, self.is_causal = module, device, is_causal
        self.caches: list[KeyValueCache] = []
        self.real: Tensor | None = None  # [b, positions so far], False at padding; None: all True

    def prefill(self, texts: Sequence[TextState]) -> Tensor:
        """Feed the prompts, padded on the left."""
        fields = [text.initial_fields() for text in texts]
        longest = max(len(each["tokens"]) for each in fields)
        room = longest + max(_positions(text) for text in texts)
        self.caches = [KeyValueCache(room) for _ in self.module.layers]
        if self.is_causal:
            return self._feed(fields, _is_real(fields, "tokens", "left"))
        head = [{name: row[:-1] for name, row in each.items()} for each in fields]
        self._feed(head, _is_real(head, "tokens", "left"))
        return self.decode([{name: row[-1:] for name, row in each.items()} for each in fields])

    def decode(self, fields: Sequence[Fields]) -> Tensor:
        """Feed one more position of each text."""
        return self._feed(fields, [[True]] * len(fields))

    def _feed(self, fields: Sequence[Fields], is_real: list[list[bool]]) -> Tensor:
        real = torch.tensor(is_real, device=self.device)
        self.real = real if self.real is None else torch.cat((self.real, real), 1)
        # [b, positions] -> [b, 1, 1, positions]
        mask = None if bool(self.real.all()) else self.real[:, None, None]
        batch = _batch(fields, "left", self.device)
        return self.module.decode_step(batch, self.caches, mask=mask)


class EncoderDecoder:
    """A batch of texts that a decoder generates from prompts that an encoder reads (T5)."""

    def __init__(self, module: EncoderDecoderModule, device: torch.device) -> None:
        self.module, self.device = module, device
        self.caches: list[DecoderCaches] = []

    def prefill(self, texts: Sequence[TextState]) -> Tensor:
        """Encode the prompts, padded on the right, and feed the decoder its first token."""
        inputs = [{"tokens": text.tokens} for text in texts]
        real = torch.tensor(_is_real(inputs, "tokens", "right"), device=self.device)
        self.mask = None if bool(real.all()) else real[:, None, None]
        self.source = self.module.encode((), _batch(inputs, "right", self.device), None, mask=self.mask)
        room = 1 + max(text.limit for text in texts)
        self.caches = [DecoderCaches(KeyValueCache(room), ContextCache()) for _ in range(self.module.decoder_depth)]
        return self.decode([text.initial_fields() for text in texts])

    def decode(self, fields: Sequence[Fields]) -> Tensor:
        """Feed the decoder one more position of each text."""
        batch = _batch(fields, "left", self.device)
        return self.module.decode_step(batch, self.source, self.caches, mask=self.mask)


def make_decoder(module: torch.nn.Module, device: torch.device) -> Decoder:
    """The decoder that this kind of module needs, for one batch of texts."""
    if isinstance(module, EncoderDecoderModule):
        return EncoderDecoder(module, device)
    assert isinstance(module, SingleStackModule)
    return StackDecoder(module, device, is_causal=get_prompt_form(module.model).continues)


def _positions(text: TextState) -> int:
    """The maximum number of positions that a text is fed after the first ones."""
    return max(1, len(text.masks)) * (text.limit + 1)


def _is_real(fields: Sequence[Fields], name: str, side: str) -> list[list[bool]]:
    rows = [[True] * len(each[name]) for each in fields]
    return [_padded(row, max(map(len, rows)), False, side) for row in rows]


def _batch(fields: Sequence[Fields], side: str, device: torch.device) -> Batch:
    """Each field as [b, s], padded with 0."""
    columns: Mapping[str, list[Sequence[int]]] = {name: [each[name] for each in fields] for name in fields[0]}
    fields_of_batch = {
        name: torch.tensor([_padded(row, max(map(len, rows)), 0, side) for row in rows], device=device)
        for name, rows in columns.items()
    }
    return Batch(torch.arange(len(fields)), fields_of_batch)


def _padded(row: Sequence[T], size: int, filler: T, side: str) -> list[T]:
    lacking = [filler] * (size - len(row))
    return [*lacking, *row] if side == "left" else [*row, *lacking]


@dataclass(frozen=True)
class TokenSampler:
    """Draws the next token of each text. temperature 0 takes the likeliest word; top_k and then
    top_p restrict the choice, after the division by the temperature (Holtzman et al., arXiv
    1904.09751, section 3)."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __call__(self, logits: Tensor, texts: Sequence[int], step: int) -> tuple[Tensor, Tensor]:
        """logits [b, v] of the texts with these numbers -> tokens [b], and their log probabilities
        [b] under the model: at temperature 1, without top_k and top_p.

        step: how many tokens were sampled for each text before. Raises FloatingPointError if a
        logit is NaN.
        """
        scores = logits.double()
        if bool(scores.isnan().any()):
            raise FloatingPointError("the model gives logits that are not numbers (NaN)")
        log_probabilities = scores.log_softmax(-1)
        tokens = scores.argmax(-1)
        if self.temperature:
            # at most 0, so that a temperature near 0 makes no two scores +inf
            heated = (scores - scores.amax(-1, keepdim=True)) / self.temperature
            noise = self._noise(scores, texts, step)
            tokens = (self._narrowed(heated) + noise).argmax(-1)
        return tokens, log_probabilities.gather(-1, tokens[:, None])[:, 0]

    def _narrowed(self, scores: Tensor) -> Tensor:
        """[b, v] with -inf for the words that top_k and top_p exclude."""
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k, -1).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, words = scores.sort(dim=-1, descending=True, stable=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            is_out = before >= self.top_p
            is_out[:, 0] = False  # top_p 0 keeps the likeliest word too
            left_out = torch.zeros_like(is_out).scatter_(-1, words, is_out)
            scores = scores.masked_fill(left_out, -torch.inf)
        return scores

    def _noise(self, scores: Tensor, texts: Sequence[int], step: int) -> Tensor:
        numbers = torch.tensor(texts, device=scores.device)[:, None, None]
        steps = torch.tensor([step], device=scores.device)[:, None]
        words = torch.arange(scores.shape[-1], device=scores.device)
        key = site_key(self.seed, "sample")
        return -uniform(key, (numbers, steps, words), torch.float64)[:, 0].log().neg().log()


def gather_logits(local: Tensor, group: Group, *, vocab: int, padded: int) -> Tensor:
    """This rank's words [b, v_local] -> [b, v], equal on every rank of the group.

    padded: rows of the word table over all ranks; those from `vocab` on have no logits.
    """
    if group.size == 1:
        return local
    rows = padded // group.size
    # [b, v_local] -> [b, padded/t] -> [b, padded] -> [b, v]
    filled = F.pad(local, (0, rows - local.shape[-1]), value=-torch.inf)
    return group.all_gather(filled, -1)[:, :vocab]


@dataclass(frozen=True)
class LoadedModel:
    """One rank's part of a model in a single pipeline stage, with its weights. tp: the group that
    splits it; dp: the ranks that write the texts of a batch in turn, where they share experts."""

    module: FamilyModule
    model: ModelSpec
    tp: Group
    device: torch.device
    dp: Group = field(default_factory=Group)

    def gather_logits(self, local: Tensor) -> Tensor:
        """This rank's logits [b, v/t] -> [b, v], equal on every rank."""
        rows = padded(self.model, self.tp)
        return gather_logits(local, self.tp, vocab=self.model.vocab, padded=rows)

    def own_texts(self, texts: Sequence[TextState]) -> list[TextState]:
        """Every dp-th text, from this rank's number on; equally many on each rank, for which the
        first text may be written twice."""
        own = texts[self.dp.rank :: self.dp.size]
        return [*own, *[texts[0]] * (-(-len(texts) // self.dp.size) - len(own))]

    def of_every_text(self, values: Tensor, texts: int) -> Tensor:
        """A value of each of `own_texts` -> [texts], equal on every rank."""
        # [m] -> [dp m] -> [m dp], in the order of the texts
        return self.dp.all_gather(values, 0).view(self.dp.size, -1).T.flatten()[:texts]


class SampledToken(NamedTuple):
    """One token of a text. text: the text's number; blank: number of the blank that it was sampled
    for; is_end: whether it ended the text or blank, of which it is then no part; finish: why the
    text has ended, None before. Fields as in the answer's ChosenToken."""

    text: int
    blank: int
    token: int
    log_probability: float
    is_end: bool
    finish: str | None


@torch.inference_mode()
def generate(loaded: LoadedModel, texts: Sequence[TextState], sampler: TokenSampler) -> Iterator[list[SampledToken]]:
    """Yield one token per step for each unfinished text, until all have finished."""
    decoder, step = make_decoder(loaded.module, loaded.device), 0
    own = loaded.own_texts(texts)
    logits = loaded.gather_logits(decoder.prefill(own))
    while True:
        sampled = sampler(logits, [text.number for text in own], step)
        tokens, log_probabilities = (loaded.of_every_text(each, len(texts)) for each in sampled)
        drawn = zip(texts, tokens.tolist(), log_probabilities.tolist(), strict=True)
        yield [_append(*each) for each in drawn if each[0].finish is None]
        if all(text.finish for text in texts):
            return
        logits = loaded.gather_logits(decoder.decode([text.next_fields() for text in own]))
        step += 1


@torch.inference_mode()
def fill_masks(loaded: LoadedModel, texts: Sequence[TextState], sampler: TokenSampler) -> Iterator[list[SampledToken]]:
    """The words at each text's `masks`, one per step, all from the same forward pass."""
    for text in texts:
        tokens = torch.tensor([text.tokens], device=loaded.device)
        batch = Batch(torch.zeros(1), {"tokens": tokens, "types": torch.zeros_like(tokens)})
        logits, _ = loaded.module(batch)
        for step, mask in enumerate(text.masks):
            full = loaded.gather_logits(logits[:, mask])
            (token,), (log_probability,) = sampler(full, [text.number], step)
            finish = "filled" if step == len(text.masks) - 1 else None
            yield [SampledToken(text.number, step, int(token), float(log_probability), False, finish)]


def _append(text: TextState, token: int, log_probability: float) -> SampledToken:
    blank = text.blank
    text.append(token)
    return SampledToken(text.number, blank, token, log_probability, token in text.ends, text.finish)


def sample(request: SampleRequest, job: JobSpec, mesh: Mesh) -> Iterator[SampleAnswer]:
    """Answer a SampleRequest; every rank of the mesh runs it. Raises InputError where the weights
    cannot be read, FloatingPointError where the model gives NaN."""
    began = time.perf_counter()
    partition = PipelinePartition.of(job, 0)
    (module,) = chunks = build_chunks(partition, mesh, machine_kernels(mesh.device, mesh.world))
    load_chunks(chunks, partition.model, Path(request["origin"]))
    pack_base(module, partition.layout.table, mesh.device)
    loaded = LoadedModel(module, partition.model, mesh.tp, mesh.device, mesh.groups["dp_cp"])
    yield {"event": "loaded", "seconds": time.perf_counter() - began}
    form = get_prompt_form(partition.model)
    write = fill_masks if form.kind is PromptKind.FILL_WORDS else generate
    sampler, size = TokenSampler(**request["draw"]), request["batch_size"]
    for start in range(0, len(request["texts"]), size):
        texts = make_text_states(form, request["texts"][start : start + size])
        yield {"event": "begin", "texts": [text.number for text in texts]}
        began = time.perf_counter()
        for tokens in write(loaded, texts, sampler):
            seconds = time.perf_counter() - began
            yield {"event": "tokens", "chosen": [*tokens], "seconds": seconds}
