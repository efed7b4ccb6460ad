"""The values of a Python script that trains with TRL or Unsloth, by the names of TRL's command line.

Read are keyword arguments of the calls in CALLS, whose values are literals, names that hold one, or a type
such as `torch.bfloat16`; another value is kept by its call, `LoraConfig.r`, which no reader takes, so that it
is listed as unread. Nothing is run. Unsloth's defaults: unslothai/unsloth, models/loader.py and llama.py.

>>> python_values("size = 512\\nargs = SFTConfig(max_seq_length=size, lr=rate)")
{'max_length': ('512',), 'SFTConfig.lr': ('rate',)}
"""

from __future__ import annotations

import ast

from mpctl.interop.config_text import Flags, flat_values, unreadable

CALLS = {
    *("SFTConfig", "SFTTrainer", "TrainingArguments", "UnslothTrainer", "UnslothTrainingArguments"),
    *("LoraConfig", "BitsAndBytesConfig", "get_peft_model", "from_pretrained"),
}
NAMES = {
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
    "max_seq_length": "max_length",
    "torch_dtype": "dtype",
    "model_name": "model_name_or_path",
    "pretrained_model_name_or_path": "model_name_or_path",
    "use_gradient_checkpointing": "gradient_checkpointing",
}
"""Names that differ from those of TRL's command line, and older ones."""
OBJECTS = {
    *(
        "args",
        "callbacks",
        "compute_metrics",
        "config",
        "data_collator",
        "device_map",
        "eval_dataset",
        "formatting_func",
    ),
    *("model", "peft_config", "processing_class", "quantization_config", "report_to", "token", "tokenizer"),
    *("train_dataset", "bnb_4bit_compute_dtype"),
}
"""Arguments that hold objects, whose own calls are read, or that change no plan."""
UNSLOTH = {
    **{"max_length": "2048", "load_in_4bit": "true", "dtype": "bfloat16"},
    **{"lora_r": "16", "lora_alpha": "16", "lora_dropout": "0.0"},
}
PEFT = {"lora_r": "8", "lora_alpha": "8", "lora_dropout": "0.0"}
LOADED = {"dtype": "auto"}
"""The dtype of a model that the script loads itself (transformers 5); SFTTrainer loads one by name in float32."""


def is_python(text: str) -> bool:
    """Whether a text is such a script."""
    return any(f"{call}(" in text for call in CALLS)


def python_values(text: str) -> Flags:
    """The values by the names of TRL's command line. Raises InputError for what is no Python."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise unreadable(f"no Python: {error}") from None
    constants: dict[str, object] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = _value(node.value, {})
    found: dict[str, object] = {}
    for node in nodes:
        if isinstance(node, ast.Call) and not ast.unparse(node.func).startswith("AutoTokenizer"):
            found |= _arguments(node, constants)
    values: Flags = {}
    for name, words in flat_values(found).items():
        last = name.rsplit(".", 1)[-1]  # of tables, as model_init_kwargs
        values[name if name.split(".")[0] in CALLS else NAMES.get(last, last)] = words
    if "LoraConfig(" in text or "get_peft_model(" in text:
        values["use_peft"] = ("true",)
    adapter, loaded = (PEFT if "use_peft" in values else {}), (LOADED if any(map(_is_load, nodes)) else {})
    defaults = UNSLOTH if is_unsloth(text) else {**adapter, **loaded}
    values = {**{name: (words,) for name, words in defaults.items()}, **values}
    if values.get("gradient_checkpointing") == ("unsloth",):
        values["gradient_checkpointing"] = ("true",)
    return values


def is_unsloth(text: str) -> bool:
    """Whether a script loads its model by Unsloth."""
    return "FastLanguageModel.from_pretrained(" in text or "FastModel.from_pretrained(" in text


def _is_load(node: ast.AST) -> bool:
    """Whether it reads a model: `AutoModelForCausalLM.from_pretrained(...)`."""
    name, _, call = ast.unparse(node.func).rpartition(".") if isinstance(node, ast.Call) else ("", "", "")
    return call == "from_pretrained" and ("Model" in name or "ForCausalLM" in name) and "Peft" not in name


def _arguments(node: ast.Call, constants: dict[str, object]) -> dict[str, object]:
    call = ast.unparse(node.func).rsplit(".", 1)[-1]
    if call not in CALLS:
        return {}
    found: dict[str, object] = {}
    if node.args and call in ("from_pretrained", "SFTTrainer") and isinstance(_value(node.args[0], constants), str):
        found["model_name_or_path"] = _value(node.args[0], constants)
    for word in node.keywords:
        if word.arg is None:
            continue
        value = _value(word.value, constants)
        if word.arg == "model" and isinstance(value, str):
            found["model_name_or_path"] = value
        elif word.arg in OBJECTS or (isinstance(word.value, ast.Constant) and word.value.value is None):
            continue
        elif value is None:
            found[f"{call}.{word.arg}"] = ast.unparse(word.value)[:60]
        else:
            found[NAMES.get(word.arg, word.arg)] = value
    return found


def _value(node: ast.expr, constants: dict[str, object]) -> object:
    """A literal, what a name holds, or the name of a type of torch; else None."""
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
        return node.attr
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(key.value): _value(value, constants) for key, value in pairs if isinstance(key, ast.Constant)}
    try:
        found: object = ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return None
    return found
