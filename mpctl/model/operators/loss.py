"""Ways to compute a cross entropy, and the chunks of a head whose logits no way holds at once.

    unfused   logits of all tokens; a copy in float32, its softmax, its gradient, kernel by kernel
    fused     logits of all tokens, in a kernel or a few
    te        Transformer Engine's kernel, which stores a gradient in float32 in forward
    linear    head and loss together, chunk by chunk of the tokens: logits of one chunk at a time

Linear saves the head's input and some floats of each token. Either backward makes each chunk's logits
again, a fourth product of the head, or forward makes both gradients at once and holds them until
backward (Liger; torchtitan's ChunkedLossWrapper). The number of chunks is stated, or follows Liger's
law: a chunk's logits have about as many elements as the hidden states of all tokens.

By hand, 1024 tokens, hidden 64, 1000 words: 1000/64 rounds up to 16 chunks of 64 tokens.
"""

from __future__ import annotations

from typing import NamedTuple


def chunk_rows(tokens: int, *, words: int, hidden: int, chunks: int | None = None, most: int | None = None) -> int:
    """Tokens of each chunk but the last.

    words: of this rank. chunks: their number, if it is stated; most: tokens of a chunk, if these are;
    else Liger's law (liger_kernel/ops/fused_linear_cross_entropy.py).

    >>> chunk_rows(1024, words=1000, hidden=64), chunk_rows(1024, words=1000, hidden=64, chunks=3)
    (64, 342)
    """
    if chunks is None and most is not None:
        return min(tokens, most)
    if chunks is not None:
        return -(-tokens // chunks)
    rows = -(-tokens // -(-words // hidden)) if words else tokens
    return min(tokens, 1 << (rows - 1).bit_length())


class LossChunks(NamedTuple):
    """How linear cuts its tokens. chunks, most: as chunk_rows'. repeats: backward makes the logits again."""

    chunks: int | None = None
    most: int | None = None
    repeats: bool = True

    def rows(self, tokens: int, *, words: int, hidden: int) -> int:
        """Tokens of a chunk."""
        return chunk_rows(tokens, words=words, hidden=hidden, chunks=self.chunks, most=self.most)
