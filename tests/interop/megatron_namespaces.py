"""A program for the interpreter that has megatron-core: command lines in, their namespaces out.

stdin: {"lines": [{"words": [...], "world": 8, "environment": {...}}, ...]} as JSON. stdout:
{"names": {flag: field of the namespace}, "has_transformer_engine": bool, "answers": [{"namespace":
{...}} or {"error": "..."}, ...]}, a namespace being what parse_args and validate_args of
megatron.training make of a line, values as JSON or as text. A line with "config" gets its
TransformerConfig too, under "config", made without fused rotary positions and permutations, which
need Transformer Engine. No GPU is asked: the generation is said to be 9 (Hopper).

Imported by nothing: tests/interop/megatron_parser.py starts it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import sys
import traceback
from typing import Any


def main() -> None:
    request = json.load(sys.stdin)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        import torch
        from megatron.training import arguments

        arguments.get_device_arch_version = lambda: 9
        torch.cuda.get_device_capability = lambda *_: (9, 0)
        parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        answers = [answer(arguments, line) for line in request["lines"]]
    names = {name: row.dest for row in parser._actions for name in row.option_strings}
    has_engine = importlib.util.find_spec("transformer_engine") is not None
    json.dump({"names": names, "has_transformer_engine": has_engine, "answers": answers}, sys.stdout)


def answer(arguments: Any, line: dict[str, Any]) -> dict[str, Any]:
    """The namespace of one line, or Megatron-LM's error."""
    sys.argv = ["pretrain_gpt.py", *line["words"]]
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(line["world"]), **line["environment"]}
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            args = arguments.validate_args(arguments.parse_args())
            made = {"config": config_of(args)} if line.get("config") else {}
    except (Exception, SystemExit) as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        return {"error": f"{error!r}, line {at.lineno}: {at.line}\n{said.getvalue()[-500:]}"}
    return {"namespace": {name: plain(value) for name, value in vars(args).items()}, **made}


def config_of(args: Any) -> dict[str, Any]:
    """The fields of the model's configuration, which checks itself."""
    from megatron.training.argument_utils import core_transformer_config_from_args

    without = argparse.Namespace(**vars(args))
    without.apply_rope_fusion, without.moe_permute_fusion = args.multi_latent_attention, False
    config = core_transformer_config_from_args(without)
    return {name: plain(value) for name, value in vars(config).items()}


def plain(value: object) -> object:
    """As JSON has it; types, enumerations and the like as text."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


if __name__ == "__main__":
    main()
