"""How config.json files of Hugging Face's BertConfig are read as models of this family."""

from __future__ import annotations

from mpctl.spec.hf import ConfigReader

READERS = {
    "bert": ConfigReader(
        shape={"family": "bert", "norm_epsilon": 1e-12},
        fixed={
            "is_decoder": False, "add_cross_attention": False,
            "position_embedding_type": "absolute",
        },
    )
}  # fmt: skip
