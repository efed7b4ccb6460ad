"""Cases of the rules of conversations."""

from tests.plan.rules.cases.case import Case

CHAT = {"data.chat.packing": "best-fit"}
GRID = {"cluster.gpus_per_node": 4, "parallel.tp": 4}
CASES = (
    Case("chat-family", CHAT, {**CHAT, "model.family": "bert"}, "data.chat", ("family bert",), r"use family gpt"),
    Case(
        "chat-tensor-mode",
        {**CHAT, **GRID},
        {**CHAT, **GRID, "parallel.tensor_mode": "2d"},
        "parallel.tensor_mode",
        ("tensor_mode 2d",),
        r"1d",
    ),
    Case(
        "chat-prediction",
        {**CHAT, "model.mtp_layers": 1, "training.runtime": "megatron-core"},
        {**CHAT, "model.mtp_layers": 1},
        "model.mtp_layers",
        ("1:", "ends of conversations"),
        r"mtp_layers 0",
    ),
    Case(
        "chat-row",
        {**CHAT, "data.chat.row_tokens": 1024.0},
        {**CHAT, "data.chat.row_tokens": 1025.0},
        "data.chat.row_tokens",
        ("1025 tokens", "1024"),
        r"1024 or less",
    ),
)
