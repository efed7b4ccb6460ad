"""Cases of the rules of training."""

from tests.rules.cases.case import Case

CASES = (
    Case(
        "freeze-matches",
        {"training.freeze": ["embedding.*", "layers.[0-5].*", "*norm*", "layers.11.mlp.up.bias"]},
        {"training.freeze": ["embedding.*", "layers.12.*"]},
        "training.freeze",
        ("'layers.12.*'", "none of 148 parameters", "layers 0 to 11"),
        r"whole name, such as layers\.0\.",
    ),
    Case(
        "freeze-leaves-some",
        {"training.freeze": ["embedding.*", "layers.*"]},
        {"training.freeze": ["embedding.*", "layers.*", "final_norm.*"]},
        "training.freeze",
        ("'embedding.*' with 'layers.*' with 'final_norm.*'", "148 of 148", "nothing is trained"),
        r"leave out a pattern",
    ),
    Case(
        "min-rate",
        {"training.learning_rate": 1e-5, "training.min_learning_rate": 1e-5},
        {"training.learning_rate": 1e-5, "training.min_learning_rate": 2e-5},
        "training.min_learning_rate",
        ("2e-05 is above learning_rate 1e-05",),
        r"use at most 1e-05",
    ),
    Case(
        "lr-decay-steps",
        {"training.lr_decay_steps": 20, "training.warmup_steps": 20},
        {"training.lr_decay_steps": 20, "training.warmup_steps": 21},
        "training.lr_decay_steps",
        ("20 steps end before the warm-up of 21",),
        r"at least 21",
    ),
    Case(
        "lr-decay-steps",
        {"training.lr_schedule": "linear", "training.lr_decay_steps": 20},
        {"training.lr_schedule": "constant", "training.lr_decay_steps": 20},
        "training.lr_decay_steps",
        ("constant has no decay",),
        r"lr_schedule linear, cosine or wsd",
    ),
    Case(
        "lr-wsd-decay-steps",
        {"training.lr_schedule": "wsd", "training.lr_wsd_decay_steps": 90},
        {"training.lr_schedule": "wsd", "training.lr_wsd_decay_steps": 91},
        "training.lr_wsd_decay_steps",
        ("91", "90", "until step 100"),
        r"use at most 90",
    ),
    Case(
        "lr-wsd-decay-steps",
        {"training.lr_schedule": "wsd", "training.lr_wsd_decay_steps": 9},
        {"training.lr_schedule": "wsd"},
        "training.lr_wsd_decay_steps",
        ("needs the length",),
        r"use 9,",
    ),
    Case(
        "lr-wsd-decay-steps",
        {},
        {"training.lr_wsd_decay_steps": 9},
        "training.lr_wsd_decay_steps",
        ("lr_schedule is cosine",),
        r"lr_schedule wsd",
    ),
)
