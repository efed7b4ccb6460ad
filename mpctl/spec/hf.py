"""The shape of a model from a Hugging Face config.json (the shape only, never weights or code).

A family says how the configs of its classes are read (ModelFamily.config_readers); this file has
what they share. Keys and defaults are those of the config classes of `transformers`. Settings that
`[model]` cannot express are refused with a message, never dropped, for plans and for weights alike.
Mixtures of experts and multi-head latent attention are recognised by their keys, under the names of
several programs. Where a class is not known, or its reader does not name such a key, one error
names them, and the dense model of the other keys is not planned instead.

An id of the hub that no preset names (presets.py) is looked for where `--fetch` keeps configs,
`$XDG_CACHE_HOME/mpctl/models/OWNER/MODEL/config.json`, and then in the hub's own cache, where
`hf download OWNER/MODEL config.json` puts it: `models--OWNER--MODEL/snapshots/COMMIT/config.json`
in the folder of HF_HUB_CACHE. There is no network here.

`{"model_type": "gpt2", "n_embd": 768, "activation_function": "gelu_new"}` gives family gpt,
hidden 768 and activation gelu_tanh.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from reprlib import repr as short
from typing import Any, TypeGuard

from mpctl.core.errors import InputError, Issue
from mpctl.spec.families import builtin_families, load_family
from mpctl.spec.paths import is_hub_id
from mpctl.spec.presets import find_file, user_folder
from mpctl.spec.yarn import YarnScales

Raw = dict[str, Any]
WHERE = "model.hf_config"
TEXT_PARTS = ("text_config", "ffn_config")  # tables in which some classes keep their decoder's keys
Found = Iterator[tuple[str, Any] | str]  # one of mpctl's keys with its value, or what is wrong

# mpctl's key -> the names that configs of different families use for it, first match wins.
NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "decoder_layers": ("num_decoder_layers",),
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "ffn": ("intermediate_size", "n_inner", "d_ff", "ffn_hidden_size"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim", "d_kv"),
    "vocab": ("vocab_size",),
    "seq_length": ("max_position_embeddings", "n_positions", "n_ctx"),
    "token_types": ("type_vocab_size",),
    "relative_buckets": ("relative_attention_num_buckets",),
    "relative_max_distance": ("relative_attention_max_distance",),
    "norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps", "norm_eps"),
    "tied_embeddings": ("tie_word_embeddings",),
}
ACTIVATION_NAMES = ("activation_function", "hidden_activation", "hidden_act", "feed_forward_proj", "activation")
PLAIN = {
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
GATED = {name: law.replace("gelu", "geglu") for name, law in PLAIN.items() if "gelu" in law}
GATED |= {"silu": "swiglu", "swish": "swiglu"}
# mpctl's key of a Llama 3.1 scaling -> that of transformers.
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position": "original_max_position_embeddings",
}
# Keys of YaRN's table -> ours; those without one give attention_factor.
YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "",
    "mscale_all_dim": "",
}
# Scalings that cost nothing and that workers do not run: rope_type -> ours ("su" before 4.43).
PLANNED_SCALINGS = {name: name for name in ("linear", "dynamic", "longrope")}
PLANNED_SCALINGS["su"] = "longrope"


@dataclass(frozen=True, kw_only=True)
class ConfigReader:
    """How the config.json of one `model_type` is read.

    shape: mpctl's keys with the class's defaults, for what the config leaves out. names: the
    class's names for keys, where they differ from NAMES. gated: whether its MLP is always gated.
    parts: functions that read more than numbers and activation. fixed: settings that change what
    the model computes and that no key of mpctl expresses, with the value that they must have. last:
    edits the complete shape after everything else is read.
    """

    shape: Mapping[str, Any]
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gated: bool = False
    parts: tuple[Callable[[Raw], Found], ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    experts: Sequence[str] = ()
    last: Callable[[Raw], Raw] = dict

    def read(self, config: Raw, file: Path) -> Raw:
        """The shape of this config. Raises InputError with everything in it that cannot be used."""
        shape: Raw = {**self.shape, "name": _name(config, file), "source": str(file)}
        wrong: list[str] = []
        found = chain(
            numbers(config, {**NAMES, **self.names}),
            activation(config, gated=self.gated),
            *(part(config) for part in self.parts),
            _fixed(config, self.fixed),
            self._others(config),
        )
        for item in found:
            if isinstance(item, str):
                wrong.append(item)
            else:
                shape[item[0]] = item[1]
        if wrong:
            hint = "give the [model] keys themselves instead of hf_config, to plan without it"
            raise InputError(Issue("hf-config", WHERE, f"{file}: {what}", hint) for what in wrong)
        if "seq_length" in shape:  # stays the model's limit where training uses shorter sequences
            shape["max_positions"] = shape["seq_length"]
        return self.last(shape)

    def _others(self, config: Raw) -> Found:
        for _, key in said_by_config(config):
            if key in config and key not in (*self.experts, *self.fixed):
                yield f"{key} {short(config[key])} cannot be expressed"


def config_readers() -> dict[str, ConfigReader]:
    """The reader of each known `model_type`, from the families that come with mpctl."""
    families = filter(None, map(load_family, builtin_families()))
    return {kind: read for family in families for kind, read in family.config_readers().items()}


def shape_from_hf(name: Any) -> Raw:
    """The `[model]` keys for the config.json at path `name`, or in the folder of that name.

    Raises InputError, always at model.hf_config, with everything in it that cannot be used.
    """
    file, config = _read(name)
    kind = config.get("model_type") if isinstance(config, dict) else None
    readers = config_readers()
    reader = readers.get(kind) if isinstance(kind, str) else None
    if isinstance(config, dict) and not (reader and reader.experts):
        _require_dense(config, file, readers)
    if reader is None:
        hint = f"known: {', '.join(sorted(readers))}; or give the [model] keys themselves"
        text = config.get("text_config") if isinstance(config, dict) else None
        inner = text.get("model_type") if isinstance(text, dict) else None
        if isinstance(inner, str) and inner in readers:
            hint = f"its text_config is a {inner}: save that table as a config.json and plan it"
        message = f"model_type {short(kind)} in {file} is not known"
        raise InputError.of("unknown-model-type", WHERE, message, hint)
    return reader.read(config, file)


def _require_dense(config: Raw, file: Path, readers: Mapping[str, ConfigReader]) -> None:
    """InputError where a config has experts or latent attention that no reader reads."""
    parts = [config, *(config[key] for key in TEXT_PARTS if isinstance(config.get(key), dict))]
    said = [pair for part in parts for pair in said_by_config(part)]
    if said:
        kinds = " and ".join(dict.fromkeys(kind for kind, _ in said))
        names = ", ".join(dict.fromkeys(name for _, name in said))
        known = ", ".join(sorted(kind for kind, reader in readers.items() if reader.experts))
        message = f"{kinds} of this class cannot be read: {names} in {file}"
        hint = f"known with experts: {known}; or give the [model] keys themselves"
        raise InputError.of("not-planned", WHERE, message, hint)


def _read(name: Any) -> tuple[Path, Any]:
    if not isinstance(name, str):
        raise InputError.of("bad-value", WHERE, f"{short(name)} is not allowed: give a path")
    file = Path(name)
    try:
        file = file / "config.json" if file.is_dir() else file
        return file, json.loads(file.read_text("utf-8"))
    except OSError as error:
        message = f"{file}: {error.strerror or error}"
        hint = "name a config.json" + ("; an id goes by model.preset" if is_hub_id(name) else "")
        raise InputError.of("no-such-file", WHERE, message, hint) from None
    except (ValueError, RecursionError) as error:
        raise InputError.of("bad-syntax", WHERE, f"{file} is no JSON: {error}") from None


def _name(config: Raw, file: Path) -> str:
    """The model's name: that of the file or its folder; for a snapshot in the hub's cache, whose
    folder is a hash, the name in the config, else its model_type."""
    folder = file.resolve().parent.name
    stem = file.stem if file.name != "config.json" else folder
    if stem and not re.fullmatch(r"[0-9a-f]{40}", stem):
        return stem
    named = config.get("_name_or_path")
    return (Path(named).name if isinstance(named, str) else "") or str(config["model_type"])


def numbers(config: Raw, names: Mapping[str, tuple[str, ...]]) -> Found:
    """mpctl's keys whose values are numbers or booleans. names: the config's names for each."""
    for ours, theirs in names.items():
        name = next((name for name in theirs if config.get(name) is not None), None)
        if name is None:
            continue
        if isinstance(config[name], int | float):
            yield ours, config[name]
        else:
            yield f"{name} is {short(config[name])}, which is no number"


def activation(config: Raw, *, gated: bool) -> Found:
    """The MLP's activation; that of a t5 is gated if its name has the prefix `gated-`.

    T5 1.1 has the tanh form in its gate and calls it gated-gelu.
    """
    for name in ACTIVATION_NAMES:
        if (text := config.get(name)) is None:
            continue
        plain = text.removeprefix("gated-") if isinstance(text, str) else ""
        known = GATED if gated or plain != text else PLAIN
        if text == "gated-gelu":
            plain = "gelu_new"
        if plain in known:
            yield "activation", known[plain]
        else:
            yield f"{name} is {short(text)}, which is none of {', '.join(known)}"
        return


def flag(config: Raw, name: str, default: bool) -> bool:
    """A setting that is true or false; null counts as the class's default."""
    value = config.get(name)
    return default if value is None else bool(value)


def rotary(config: Raw, *, fraction: float = 1.0) -> Found:
    """Base, share and scaling of rotary positions: one table since transformers 5, keys before.

    fraction: part of a head that the class turns where the config does not say.
    """
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(table, dict):
        yield f"the scaling of rotary positions is {short(table)}, which is no table"
        return
    for ours, theirs, default in (
        ("rotary_base", ("rope_theta", "rotary_emb_base"), None),
        ("rotary_fraction", ("partial_rotary_factor", "rotary_pct"), fraction),
    ):
        places = ((name, where[name]) for where in (table, config) for name in theirs if where.get(name) is not None)
        name, value = next(places, (theirs[0], default))
        if is_number(value):
            yield ours, float(value)
        elif value is not None:
            yield f"{name} is {short(value)}, which is no number"
    yield from _scaling(table)


def _scaling(table: Raw) -> Found:
    law = table.get("rope_type", table.get("type", "default"))
    law = law if isinstance(law, str) else repr(law)
    if law == "llama3":
        given = {ours: table[theirs] for ours, theirs in SCALING.items() if theirs in table}
        wrong = [SCALING[key] for key in SCALING if not is_number(given.get(key))]
        if wrong:
            yield f"rope_type llama3 lacks a number for {', '.join(wrong)}"
        else:
            yield "rotary_scaling", {key: float(value) for key, value in given.items()}
    elif law == "yarn":
        yield from _yarn(table)
    elif law in PLANNED_SCALINGS:
        yield "rotary_scaling_type", PLANNED_SCALINGS[law]
    elif law != "default":
        known = ", ".join(("default", "llama3", "yarn", *PLANNED_SCALINGS))
        yield f"rope_type is {short(law)}, which is none of {known}"


def _yarn(table: Raw) -> Found:
    """YaRN; `mscale` and `mscale_all_dim` give attention_factor where it is not stated."""
    given = {key: table[key] for key in YARN if table.get(key) is not None}
    needed = ("factor", "original_max_position_embeddings")
    wrong = [key for key in needed if key not in given]
    wrong += [key for key, value in given.items() if not is_number(value)]
    if wrong:
        yield f"rope_type yarn lacks a number for {', '.join(wrong)}"
        return
    scaling: Raw = {YARN[key]: float(value) for key, value in given.items() if YARN[key]}
    if "mscale" in given and "mscale_all_dim" in given and "attention_factor" not in given:
        scales = YarnScales(*(given[key] for key in ("factor", "mscale", "mscale_all_dim")))
        scaling["attention_factor"] = scales.attention_factor
    if table.get("truncate") is False:
        scaling["truncate"] = False
    yield "yarn_scaling", scaling


def window(config: Raw, size: Any, *, full_every: int | None = None) -> Found:
    """Sliding windows of `size` tokens in every layer except each full_every-th, unless layer_types
    says which layers have them; none where the window is as long as the sequence."""
    length = next((config[n] for n in NAMES["seq_length"] if is_number(config.get(n))), None)
    if size is None:
        return
    if not is_number(size):
        yield f"sliding_window is {short(size)}, which is no number"
        return
    if length is not None and size >= length:
        return
    pattern = {} if full_every is None else {"full_attention_every": full_every}
    if (kinds := config.get("layer_types")) is not None:
        found = _pattern(kinds)
        if found is None:
            yield f"layer_types {short(kinds)}: no pattern of windows that can be expressed"
            return
        pattern = found
    if pattern.get("attention_window_every") != 0:
        yield from {"attention_window": size, **pattern}.items()


def _pattern(kinds: Any) -> dict[str, int] | None:
    """mpctl's keys that say which layers have a window; attention_window_every 0 where none has
    one, None where no keys can say it."""
    names = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or not all(kind in names for kind in kinds):
        return None
    has_window = [kind == names[1] for kind in kinds]
    if not any(has_window):
        return {"attention_window_every": 0}
    for n in range(1, len(kinds) + 1):
        if has_window == [layer % n == 0 for layer in range(len(kinds))]:
            return {"attention_window_every": n}
        if has_window == [(layer + 1) % n != 0 for layer in range(len(kinds))]:
            return {"full_attention_every": n}
    return {} if all(has_window) else None


def _fixed(config: Raw, fixed: Mapping[str, Any]) -> Found:
    for key, value in fixed.items():
        given = config.get(key, value)
        if given != value and not (given is None and value is False):
            yield f"{key} {short(given)} cannot be expressed, only {json.dumps(value)}"


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether it is a JSON number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def shape_by_id(name: object) -> dict[str, Any] | None:
    """The `[model]` keys for the fetched config.json of the model with this id; None where a preset
    has the id, nothing was fetched, or `name` is not an id. Raises InputError as shape_from_hf
    does."""
    if not is_hub_id(name) or find_file("models", str(name)) is not None:
        return None
    path = find_fetched(str(name))
    if path is None:
        return None
    return {**shape_from_hf(str(path)), "name": str(name).rpartition("/")[2]}


def find_fetched(name: str) -> Path | None:
    """The config.json of the model with this id, if it is on this machine."""
    path = fetched_path(name)
    return path if path is not None and path.is_file() else _in_hub_cache(name)


def fetched_path(name: str) -> Path | None:
    """Return the path where `--fetch` stores the config.json of this id; None for a user without a home folder."""
    cache = user_folder("XDG_CACHE_HOME", ".cache")
    return None if cache is None else cache / "mpctl" / "models" / name / "config.json"


def _in_hub_cache(name: str) -> Path | None:
    """The config.json of the commit that is `main` in the hub's cache."""
    folder = _hub_cache()
    if folder is None:
        return None
    model = folder / f"models--{name.replace('/', '--')}"
    try:
        commit = (model / "refs" / "main").read_text("utf-8").strip()
    except (OSError, ValueError):
        return None
    path = model / "snapshots" / commit / "config.json"
    return path if re.fullmatch(r"[0-9a-f]{40}", commit) and path.is_file() else None


def _hub_cache() -> Path | None:
    """The folder in which Hugging Face's own tools keep what they download."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder)
    if folder := os.environ.get("HF_HOME"):
        return Path(folder) / "hub"
    cache = user_folder("XDG_CACHE_HOME", ".cache")
    return None if cache is None else cache / "huggingface" / "hub"


EXPERTS, LATENT = "mixtures of experts", "multi-head latent attention (MLA)"
EXPERT_KEYS = ("n_group", "topk_group", "first_k_dense_replace", "capacity_factor")
LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Classes of transformers that always have experts or MLA: their config.json may leave out the keys.
EXPERT_TYPES = ("dbrx", "jamba", "llama4", "llama4_text", "switch_transformers", "deepseek_v32", "minimax")
LATENT_TYPES = ("deepseek_v32", "minicpm3")


def kind_of_key(key: str) -> str | None:
    """EXPERTS or LATENT if a key of this name marks such a model, else None."""
    if key in LATENT_KEYS:
        return LATENT
    return EXPERTS if key in EXPERT_KEYS or "expert" in key or key.startswith("moe") else None


def said_by_config(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Kind and name of each class or key in a config.json that marks experts or latent attention; a
    count of 0 or 1, null and false mark nothing."""
    model_type = config.get("model_type")
    if isinstance(model_type, str):
        if model_type in EXPERT_TYPES or "moe" in model_type:
            yield EXPERTS, f"model_type {model_type}"
        if model_type in LATENT_TYPES:
            yield LATENT, f"model_type {model_type}"
    for key, value in config.items():
        kind = kind_of_key(key)
        is_many = isinstance(value, int | float) and not isinstance(value, bool) and value > 1
        if kind and (is_many or (value and isinstance(value, list | dict))):
            yield kind, key
