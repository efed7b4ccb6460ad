"""How config.json files of Hugging Face's T5Config are read as models of this family.

Relative positions set no bound, so that the lengths are those that T5 was trained at: inputs, and
the targets that corrupting 15 % of 568 tokens in spans of 3 leaves (arXiv 1910.10683, sections
3.1.2 and 3.1.4).
"""

from __future__ import annotations

from mpctl.spec.hf import ConfigReader, Found, Raw

LENGTHS: Raw = {"seq_length": 512, "decoder_seq_length": 114}


def _scaled(config: Raw) -> Found:
    """A T5 scales its logits where the word table is its head, and nowhere else.

    transformers 5 says which by a key of its own, beside a tie_word_embeddings that is true for a
    head of its own as well.
    """
    scaled = config.get("scale_decoder_outputs")
    if scaled is None:
        return
    if scaled is True and config.get("tie_word_embeddings") is False:
        yield "scale_decoder_outputs true without tie_word_embeddings cannot be expressed"
    else:
        yield "tied_embeddings", scaled


def _with_lengths(shape: Raw) -> Raw:
    shape = {key: value for key, value in shape.items() if key != "max_positions"} | LENGTHS
    if "layers" in shape:
        shape.setdefault("decoder_layers", shape["layers"])
    return shape


READERS = {
    "t5": ConfigReader(
        shape={
            "family": "t5", "activation": "relu", "norm": "rmsnorm", "position": "relative",
            "bias": False, "head_dim": 64, "norm_epsilon": 1e-6,
        },
        parts=(_scaled,),
        fixed={"is_encoder_decoder": True, "is_decoder": False},
        last=_with_lengths,
    )
}  # fmt: skip
