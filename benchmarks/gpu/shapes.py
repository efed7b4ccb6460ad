"""The models that are trained on one device, and the FLOP of a token.

    gpt-small     4 layers, hidden 1024: the first that a device is tried with
    gpt-1.5b      28 layers, hidden 2048, learned positions, LayerNorm, gelu, tied head
    gpt2-xl       48 layers, hidden 1600, GPT-2's 50,257 words, which no kernel likes
    llama-1b      16 layers, hidden 2048, 32 heads of 64 on 8 of keys, SwiGLU 8192 (Llama 3.2 1B)
    llama-1b-32k  the same with 32,768 positions
    llama-8b      8 of the 32 layers of Llama 3.1 8B, whose states alone would fill a device
    llama-8b-tp8  what one rank of 8 has of all 32: 4 heads on 1 of keys, 1/8 of MLP and table; the
                  hidden states are not cut. Its messages are absent, so that its speed is what tp 8
                  could reach at best

MFU counts (6 N + 12 L a d s) FLOP a token (Chowdhery et al., arXiv 2204.02311, appendix B): N
parameters of products, the head's with them, a heads of size d, sequence s. That counts the half of
attention's scores that the causal mask leaves out, which no kernel computes; with the half deducted
it is 6 N + 6 L a d s. By hand, gpt-1.5b: N = 28 x 12 x 2048^2 + 50304 x 2048 = 1.512e9, so 10.5e9
FLOP a token with 12 x 28 x 2048 x 2048 of attention, 9.8e9 with the half deducted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class Shape:
    """A decoder. family: gpt or llama; ffn: columns of the MLP; batch: samples of a step, of one
    micro batch."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    seq: int
    batch: int

    @property
    def parameters(self) -> int:
        """Those of products; norms, biases and positions are left out."""
        width, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        mlp = (3 if self.family == "llama" else 2) * self.hidden * self.ffn
        layer = self.hidden * (2 * width + 2 * kv) + mlp
        return self.layers * layer + self.vocab * self.hidden

    @property
    def attention_flops(self) -> float:
        """A token's of the products of queries, keys and values, forward and backward, the masked
        half with them."""
        return 12 * self.layers * self.heads * self.head_dim * self.seq

    @property
    def flops_per_token(self) -> float:
        """Of forward and backward, the masked half of attention with them."""
        return 6 * self.parameters + self.attention_flops

    @property
    def causal_flops_per_token(self) -> float:
        """The same with the masked half deducted."""
        return 6 * self.parameters + self.attention_flops / 2

    @property
    def settings(self) -> dict[str, object]:
        """The same model as settings of a job."""
        llama = {
            "model.norm": "rmsnorm",
            "model.position": "rotary",
            "model.activation": "swiglu",
            "model.bias": False,
            "model.kv_heads": self.kv_heads,
        }
        return {
            "model.family": "gpt",
            "model.layers": self.layers,
            "model.hidden": self.hidden,
            "model.heads": self.heads,
            "model.head_dim": self.head_dim,
            "model.ffn": self.ffn,
            "model.vocab": self.vocab,
            "model.seq_length": self.seq,
            "training.micro_batch_size": self.batch,
            **(llama if self.family == "llama" else {}),
        }

    def as_dict(self) -> dict[str, object]:
        """For another process."""
        return asdict(self)


SHAPES = {
    "gpt-small": Shape("gpt", 4, 1024, 16, 16, 64, 4096, 50304, 1024, 4),
    "gpt2-xl": Shape("gpt", 48, 1600, 25, 25, 64, 6400, 50257, 1024, 8),
    "gpt-1.5b": Shape("gpt", 28, 2048, 16, 16, 128, 8192, 50304, 2048, 8),
    "llama-1b": Shape("llama", 16, 2048, 32, 8, 64, 8192, 128256, 2048, 8),
    "llama-1b-32k": Shape("llama", 16, 2048, 32, 8, 64, 8192, 128256, 32768, 1),
    "llama-8b": Shape("llama", 8, 4096, 32, 8, 128, 14336, 128256, 2048, 4),
    "llama-8b-tp8": Shape("llama", 32, 4096, 4, 1, 128, 1792, 16128, 2048, 4),
}


def tiny(shape: Shape) -> Shape:
    """A shape of the same kind for trying the script out on a CPU."""
    heads = min(shape.heads, 4)
    return replace(
        shape,
        layers=2,
        hidden=64,
        heads=heads,
        kv_heads=min(shape.kv_heads, heads),
        head_dim=16,
        ffn=128,
        vocab=512,
        seq=64,
        batch=2,
    )
