"""The requests to the ranks of a bench, `mpctl eval` and `mpctl sample`, and the answers.

A bench's request is RUN/bench.json, and rank 0 appends its answers to RUN/answers.jsonl
(train/runtime/worker.py). `mpctl eval` and `mpctl sample` exchange files with their workers
through a temporary folder:

FOLDER/ job.json       the layout and the model, written by the command
        request.json   what to do: an EvalRequest or a SampleRequest
        answers.jsonl  rank 0's answers, one JSON object a line, written as they come
        refused.json   issues of a rank that found its input bad
        failures/      a FailureRecord of each rank that an exception ended (rank_files.py)
        logs/          what the ranks print
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from typing_extensions import ReadOnly, TypedDict

from mpctl.records.rundir.rank_files import Traffic
from mpctl.spec.base import DType
from mpctl.spec.model import ModelSpec

ChosenToken = tuple[int, int, int, float, bool, str | None]
"""(prompt number, blank, token id, log probability, whether it ends the text, how the text is
finished: "end-of-text", "filled", "length", or None while it continues)."""
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "sendrecv"]
Transport = Literal["gloo", "nccl", "shared"]
CollectiveOp = Literal["sum", "max", "none"]
SPLIT = frozenset({"all_gather", "reduce_scatter", "all_to_all"})
"""Kinds whose message has a block for each rank of the group."""
ADDING = frozenset({"all_reduce", "reduce_scatter", "reduce"})
"""Kinds that add up."""
KernelName = Literal[
    "matmul",
    "grouped_matmul",
    "attention",
    "unfused_attention",
    "heads",
    "branch",
    "activation",
    "cross_entropy",
    "optimizer",
    "accumulate",
    "triad",
    "copy",
    "layer",
]
"""matmul: a product of a linear layer. grouped_matmul: one product for each expert of a rank, with
equal numbers of rows. attention: softmax(Q K^T) V, which keeps no scores; unfused_attention: step
by step, as attention dropout needs it. heads: queries, keys and values out
of one product, with rotary positions, and heads side by side for the next. branch: norm, dropout
and sum of a residual branch. activation: that of an MLP. optimizer: gradient norm, clipping, AdamW
and zeroing. accumulate: adding a micro batch's gradients to the step's. triad: a = b + s c; copy:
a = b. layer: a complete transformer layer."""
KernelPart = Literal["forward", "backward", "backward_input", "backward_weight", "both", "update"]
"""both: forward and backward; update: of a kernel that has no passes."""
LAYER_SIZES = ("hidden", "heads", "kv_heads", "head_dim", "ffn", "seq_length")
"""Keys of the shape of a `layer`, which is dense, in addition to micro_batch_size and whether it is
causal."""


class BenchRequest(TypedDict):
    """Keys of every request to the ranks of a bench. task: which probe answers it
    (train/runtime/worker.py, find_probe); other keys depend on the probe."""

    task: ReadOnly[str]


class CorpusRequest(TypedDict):
    """prefix: path of an indexed dataset without its suffixes; tokenizer: the tokenizer.json that
    made it; words: token ids that its text may use, 0 to words - 1."""

    prefix: str
    tokenizer: str
    words: int


class EvalRequest(TypedDict):
    """Compute the mean loss over each corpus. origin: path of the weights, which train/weights/origin.py
    opens; samples: the first N of each corpus, None for all."""

    task: Literal["evaluate"]
    origin: str
    corpora: list[CorpusRequest]
    samples: int | None


class PromptRequest(TypedDict):
    """One prompt, tokenized. number: its place among the prompts; masks: places of the blanks to
    fill; limit: most tokens to write (for a blank, of glm); ends: token ids that end a text;
    special: ids of the family's special tokens by name."""

    number: int
    tokens: list[int]
    masks: list[int]
    limit: int
    ends: list[int]
    special: dict[str, int]


class DrawRequest(TypedDict):
    """Settings of the choice of a token by its probability (train/runtime/sampling.py)."""

    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int


class SampleRequest(TypedDict):
    """Write text for each prompt, `batch_size` prompts at once."""

    task: Literal["sample"]
    origin: str
    texts: list[PromptRequest]
    draw: DrawRequest
    batch_size: int


class LayerCase(TypedDict):
    """All ranks as one grid of this tensor mode; depth: of 2.5d."""

    mode: str
    depth: int | None


class LayerRequest(TypedDict):
    """Time one layer in every case, `steps` passes at a time, in at most so many `rounds` of all
    cases; seconds: that all rounds may take, None for no limit."""

    task: Literal["layers"]
    cases: list[LayerCase]
    rounds: int
    steps: int
    seconds: float | None


class LoadedAnswer(TypedDict):
    """The first answer: the model is in memory, after so many seconds."""

    event: Literal["loaded"]
    seconds: float


class EvalProgress(TypedDict):
    """corpus: its index in the request; done and total: micro batches of rank 0."""

    event: Literal["progress"]
    corpus: int
    done: int
    total: int


class CorpusAnswer(TypedDict):
    """The result of one corpus. tokens: predictions over which the loss is averaged."""

    event: Literal["corpus"]
    corpus: int
    loss: float
    samples: int
    tokens: int
    seconds: float


class BatchBegins(TypedDict):
    """Numbers of the prompts that are written next, together."""

    event: Literal["begin"]
    texts: list[int]


class TokensAnswer(TypedDict):
    """One token for each prompt of the batch; seconds since the batch began."""

    event: Literal["tokens"]
    chosen: list[ChosenToken]
    seconds: float


class LayerSizes(TypedDict):
    """Memory and messages of a rank in a case, None for the unsharded layer: bytes of parameters
    and of what forward saves for backward, of the fullest rank; traffic: of rank 0 in a pass."""

    event: Literal["sizes"]
    case: int | None
    parameter_bytes: int
    saved_bytes: int
    traffic: Traffic


class LayerTiming(TypedDict):
    """One round of a case: seconds of a pass on the slowest rank, and processor seconds of a pass
    on the average rank."""

    event: Literal["timing"]
    case: int
    round: int
    seconds: float
    cpu_seconds: float


LayerAnswer = LayerSizes | LayerTiming
EvalAnswer = LoadedAnswer | EvalProgress | CorpusAnswer
SampleAnswer = LoadedAnswer | BatchBegins | TokensAnswer


class CollectiveCase(TypedDict):
    """A collective to be timed in all groups of an axis at once. axis: the group's name in plans;
    dtype: as torch calls it, "float32"; op: "none" where nothing is added up."""

    kind: CollectiveKind
    axis: str
    transport: Transport
    dtype: str
    op: CollectiveOp
    bytes: int
    count: int


class CollectivesRequest(TypedDict):
    """Time every case in `rounds` of all cases: `warm_up` calls, then `iterations` that count.

    root: the rank of the group that broadcasts and gets a reduction. seconds: begin no round that
    would end later than this after the first began, None for no limit. check: compare the result
    with the right one in every round.
    """

    task: Literal["collectives"]
    cases: list[CollectiveCase]
    rounds: int
    iterations: int
    warm_up: int
    root: int
    check: bool
    seconds: float | None


class CollectiveRound(TypedDict):
    """One round of a case: the mean seconds of a call on the slowest rank, and how many elements of
    all ranks differ from the right result, -1 where they were not compared."""

    event: Literal["timing"]
    case: int
    round: int
    seconds: float
    wrong: int


class AbsentTransport(TypedDict):
    """Groups of an axis do not have this transport on some rank, so that its cases are left out."""

    event: Literal["absent"]
    axis: str
    transport: Transport


CollectiveAnswer = CollectiveRound | AbsentTransport


class KernelCase(TypedDict):
    """A kernel to be timed. dtype: in mpctl's words, such as fp32; shape: its sizes by name
    (measure/bench/kernel_list.py says which a kernel has); copies: sets of operands that are used in turn,
    so that caches do not hold them all."""

    kernel: KernelName
    part: KernelPart
    dtype: DType
    shape: dict[str, int]
    copies: int


class KernelRequest(TypedDict):
    """Time every case in so many rounds. dropout, attention_dropout: probabilities, as in training.
    ranks: numbers of ranks that run a case at once, the largest no more than there are. seconds:
    that all rounds may take, None for no limit; the first round is always completed. least_seconds:
    of one timing, which repeats a kernel that is shorter."""

    task: Literal["kernels"]
    cases: list[KernelCase]
    dropout: float
    attention_dropout: float
    ranks: list[int]
    rounds: int
    seconds: float | None
    least_seconds: float


class KernelTiming(TypedDict):
    """One case in one round. seconds: of one run of the kernel on the slowest of the ranks;
    cpu_seconds: processor time of one run on the average of them; repeats: runs timed together."""

    event: Literal["kernel"]
    round: int
    case: int
    ranks: int
    seconds: float
    cpu_seconds: float
    repeats: int


def dense_model(model: ModelSpec) -> ModelSpec:
    """The model with an MLP and multi-head attention in every layer."""
    return model.model_copy(update={"experts": None, "attention_kind": "mha"})


def sized_layer(model: ModelSpec, sizes: Mapping[str, int]) -> ModelSpec:
    """A dense model with other sizes of a layer, by the names of its settings."""
    return dense_model(model).model_copy(update={name: sizes[name] for name in LAYER_SIZES})
