"""What `mpctl eval` and `mpctl sample` exchange with their workers, through files in a temporary
folder, and what `mpctl bench tensor-modes` asks of ranks and is answered (runtime/measure.py).

FOLDER/ job.json       the layout and the model, written by the command
        request.json   what to do: an EvalRequest or a SampleRequest
        answers.jsonl  rank 0's answers, one JSON object a line, written as they come
        refused.json   issues of a rank that found its input bad
        failures/      a FailureRecord of each rank that an exception ended (rank_files.py)
        logs/          what the ranks print
"""

from __future__ import annotations

from typing import Literal

from typing_extensions import ReadOnly, TypedDict

from mpctl.rundir.rank_files import Traffic


class BenchRequest(TypedDict):
    """What every request to the ranks of a bench has. task: which of runtime/measure.py's probes
    answers it; other keys are the probe's own."""

    task: ReadOnly[str]


class CorpusRequest(TypedDict):
    """prefix: path of an indexed dataset without its suffixes; tokenizer: the tokenizer.json that
    made it; words: token ids that its text may use, 0 to words - 1."""

    prefix: str
    tokenizer: str
    words: int


class EvalRequest(TypedDict):
    """Compute the mean loss over each corpus. origin: the weights, as weights/origin.py opens them;
    samples: the first N of each corpus, None for all."""

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
    """How a token is chosen from the model's probabilities (runtime/sampling/draw.py)."""

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
    """The result of one corpus. tokens: predictions that the loss is the mean of."""

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


ChosenToken = tuple[int, int, int, float, bool, str | None]
"""(prompt number, blank, token id, log probability, whether it ends the text, how the text is
finished: "end-of-text", "filled", "length", or None while it goes on)."""


class TokensAnswer(TypedDict):
    """One token for each prompt of the batch; seconds since the batch began."""

    event: Literal["tokens"]
    chosen: list[ChosenToken]
    seconds: float


class LayerSizes(TypedDict):
    """What a rank holds and sends in a case, None for the unsharded layer: bytes of parameters and
    of what forward keeps for backward, of the rank that has most; traffic: of rank 0 in a pass."""

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
