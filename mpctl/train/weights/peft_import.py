"""A folder of Hugging Face's peft as adapters of mpctl: a checkpoint that holds them alone, and names its base.

Adapters of a module that computes several outputs of a product (GPT-2's c_attn, gate_up_proj of fused experts) stay
one adapter of all of them, where mpctl's targets can say so. If B is made of blocks, one for each output, as peft and
mpctl write fused ones, or if no target says so, each output gets its own: its block, or all of A with its rows of B.

mpctl has one rank and one factor for all adapters. Smaller ranks are filled up with zeros, in A and in B: what they
compute and how they train stays the same. Modules without an adapter, of targets that are in other layers, get zeros
too. Another factor than the first module's goes into B.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mpctl.core.errors import InputError, Issue
from mpctl.core.shard import Shard
from mpctl.model.families import get_table
from mpctl.model.operators.adapters import MAGNITUDE, NAMES, QKV, UP, adapter_name
from mpctl.records.checkpoint.folder import staged_folder
from mpctl.records.checkpoint.manifest import Manifest, ParameterPlacement, ShardFile, ShardRecord
from mpctl.records.checkpoint.tensor_header import FLOATS, TensorHeader, read_header, unreadable
from mpctl.records.checkpoint.verify import Progress, counted, ignore_progress
from mpctl.spec.adapter import AdapterSpec
from mpctl.spec.model import ModelSpec
from mpctl.train.checkpoint.tensor_file import Entry, in_file_order, write_file
from mpctl.train.weights.names import get_scheme, rows_of
from mpctl.train.weights.origin import FRAGMENT, open_origin, origin_adapter
from mpctl.train.weights.peft_config import PICKLE, TENSORS, PeftConfig, read_config
from mpctl.train.weights.peft_export import DIGEST, PREFIX
from mpctl.train.weights.peft_modules import PeftModule, peft_modules
from mpctl.train.weights.reader import rows_of_pairs
from mpctl.train.weights.tokens import TOKENIZER
from mpctl.train.weights.values import base_reference, router_biases_of, widest
from mpctl.train.weights.writer import Written, files_of, fragment, total_bytes

PART_TARGETS = dict(zip((*QKV, *UP), ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), strict=True))


@dataclass
class FileAdapter:
    """One adapter of the file. rows: of the module that it is for; names: of A and B, for each expert one or a single
    one for all. magnitude: DoRA's, empty without. rank, scale: its own. outputs: of the product, in these rows."""

    module: PeftModule
    rows: range
    names: tuple[tuple[str, str], ...]
    rank: int
    scale: float
    magnitude: str = ""
    outputs: dict[str, range] = field(default_factory=dict)

    @property
    def kind(self) -> tuple[str, tuple[str, ...]]:
        """Adapters of one kind are alike in all layers."""
        return self.module.kind, tuple(self.outputs)


@dataclass(frozen=True)
class PeftFolder:
    """A folder of peft's: its config, the headers of its tensors, and the digest of the base that it was trained on,
    empty where it does not say."""

    path: Path
    config: PeftConfig
    tensors: dict[str, TensorHeader]
    digest: str

    def read(self, name: str) -> Tensor:
        """A tensor of it. Raises InputError where it cannot be read or is not finite."""
        file = self.path / TENSORS
        try:
            with safe_open(file, framework="pt") as stored:
                tensor: Tensor = stored.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise unreadable(file, f"{name}: {error}") from None
        if not tensor.isfinite().all():
            raise InputError.of("weights-not-finite", str(file), f"{name}: NaN or infinite")
        return tensor


def open_folder(path: Path) -> PeftFolder:
    """A folder of peft's, by its config and headers. No pickle is opened."""
    config, file = read_config(path), path / TENSORS
    if not file.is_file():
        if (path / PICKLE).is_file():
            message = f"holds {PICKLE} only, a pickle, which can run code and is never opened"
            hint = "save it as safetensors, where you trust it: model.save_pretrained(OUT) of peft"
            raise InputError.of("weights-pickled", str(path), message, hint)
        raise InputError.of("no-adapter", str(path), f"holds no {TENSORS}", "save the adapter again with peft")
    tensors = read_header(file)
    if wrong := [name for name, tensor in tensors.items() if tensor.dtype not in FLOATS]:
        raise InputError.of("weights-dtype", str(file), f"{wrong[0]} is {tensors[wrong[0]].dtype}")
    with safe_open(file, framework="pt") as stored:
        metadata = stored.metadata() or {}
    return PeftFolder(path, config, tensors, str(metadata.get(DIGEST, "")))


def import_adapters(
    source: Path, out: Path, *, base: Path | None = None, on_progress: Progress = ignore_progress
) -> Written:
    """A checkpoint of ours at `out` with the adapters in `source`. base: the weights that they add to; where the
    adapter's config says when absent. Raises InputError where they are of another base."""
    with staged_folder(out) as work:
        folder = open_folder(source)
        path = base or _stated_base(folder)
        origin = open_origin(path)
        if origin_adapter(origin) is not None:
            hint = "merge them first: `mpctl checkpoint export RUN OUT --merged`"
            raise InputError.of("adapter-base", str(path), "has adapters itself", hint)
        reference = base_reference(path, origin)
        if folder.digest and folder.digest != reference.digest:
            message = f"has the digest {reference.digest[:12]}, but the adapters were trained on {folder.digest[:12]}"
            raise InputError.of("adapter-base", str(path), message, "name the base that they were trained on: --base")
        made = _Adapters.of(folder, origin.model)
        checkpoint = work / "checkpoints" / "step-0"
        checkpoint.mkdir(parents=True)
        entries = in_file_order(made.entries())
        shard = ShardFile(name="shard-0", coords={"pp": 0, "tp": 0})
        file = write_file(shard.path(checkpoint), entries, counted("import", total_bytes(entries), on_progress))
        placements = {e.name.removesuffix("/value"): ParameterPlacement.of(Shard(e.shape)) for e in entries}
        ShardRecord.of(file, placements, []).write(shard.record_path(checkpoint))
        biases = router_biases_of(origin)
        Manifest(step=0, shards=[shard], router_bias=biases, base=reference).write(checkpoint)
        tokenizer = origin.tokenizer
        if tokenizer is not None:
            shutil.copyfile(tokenizer, work / TOKENIZER)
        text = fragment(origin.model, out.resolve(), tokenizer=tokenizer is not None, adapter=made.spec)
        (work / FRAGMENT).write_text(text, "utf-8")
        files = files_of(work)
    return Written(
        source=source,
        out=out,
        architecture=get_scheme(origin.model).architecture,
        parameters=sum(torch.Size(entry.shape).numel() for entry in entries),
        bytes=total_bytes(entries),
        dtype=widest(entry.dtype for entry in entries),
        files=files,
        notes=tuple(made.notes),
        model=origin.model,
    )


def _stated_base(folder: PeftFolder) -> Path:
    stated = Path(folder.config.base)
    if folder.config.base and stated.exists():
        return stated
    message = f"base_model_name_or_path is {folder.config.base!r:.80}, which is no folder here"
    hint = "name the weights that it adds to: --base DIR, a Hugging Face directory, a run or an import"
    raise InputError.of("adapter-base", str(folder.config.path), message, hint)


class _Adapters:
    """The adapters of a folder as parameters of ours. spec: their settings; notes: what was filled up."""

    def __init__(self, folder: PeftFolder, model: ModelSpec, sources: list[FileAdapter], saved: dict[str, str]) -> None:
        self.folder, self.model, self.saved = folder, model, saved
        self.notes: list[str] = []
        self.split = self._split(sources)
        self.sources = sources
        self.spec = self._spec()
        self.made = self._made()

    @classmethod
    def of(cls, folder: PeftFolder, model: ModelSpec) -> _Adapters:
        issues: list[Issue] = []
        sources, used = list[FileAdapter](), set[str]()
        for module in peft_modules(model):
            for source in _sources(folder, module, issues):
                sources.append(source)
                used |= {name for pair in source.names for name in pair} | {source.magnitude}
        saved = _saved_modules(folder, model, issues)
        for name in sorted(folder.tensors.keys() - used - saved.keys()):
            if not name.endswith(".base_layer.weight"):  # a copy of the base's embedding or head
                shape = list(folder.tensors[name].shape)
                message = f"holds {name} {shape}, which is no adapter of a linear layer of the base"
                hint = "name the base that it was trained on with --base; embeddings have no adapters in mpctl"
                issues.append(Issue("adapter-foreign", str(folder.path / TENSORS), message, hint))
        if not (sources or issues):
            issues.append(Issue("no-adapter", str(folder.path / TENSORS), "has no adapter"))
        if issues:
            raise InputError(issues)
        return cls(folder, model, sources, saved)

    def _split(self, sources: list[FileAdapter]) -> dict[tuple[str, tuple[str, ...]], bool]:
        """By kind of adapters for several outputs: whether each output has a block of B of its own."""
        found: dict[tuple[str, tuple[str, ...]], bool] = {}
        for source in sources:
            if len(source.outputs) > 1:
                found[source.kind] = found.get(source.kind, True) and self._has_blocks(source)
        return found

    def _has_blocks(self, source: FileAdapter) -> bool:
        count = len(source.outputs)
        if source.rank % count:
            return False
        _, up = self._factors(source)
        rank = source.rank // count
        for number, rows in enumerate(source.outputs.values()):
            block = up[..., rows.start : rows.stop, :].clone()
            block[..., number * rank : (number + 1) * rank] = 0
            if block.any():
                return False
        return True

    def _rank(self, source: FileAdapter) -> int:
        return source.rank // len(source.outputs) if self.split.get(source.kind) else source.rank

    def _spec(self) -> AdapterSpec:
        """Settings whose adapters are those of the file, where any are."""
        config, first = self.folder.config, self.sources[0]
        rank = max(map(self._rank, self.sources))
        alpha = first.scale * (rank**0.5 if config.rslora else rank)
        whole = AdapterSpec(
            kind="dora" if config.dora else "lora",
            rank=rank,
            alpha=alpha,
            rslora=config.rslora,
            dropout=config.dropout,
            modules_to_save=[name.rpartition(".")[2] for name in config.saved],
        )
        for targets in (self._targets(fused=True), self._targets(fused=False), self._targets(fused=False, ours=True)):
            spec = whole.model_copy(update={"targets": targets})
            wanted, found = self._wanted(spec), self._of(spec)
            if wanted <= found and (wanted == found or targets == self._targets(fused=False, ours=True)):
                return spec
        raise InputError.of(
            "adapter-unsupported",
            str(config.path),
            f"adapters of {', '.join(sorted({source.module.kind for source in self.sources}))} are no set of targets",
            "merge it with peft, merge_and_unload(), and start from the merged weights",
        )

    def _targets(self, *, fused: bool, ours: bool = False) -> list[str]:
        names: dict[str, None] = {}
        for source in self.sources:
            names |= dict.fromkeys(self._target_names(source, fused=fused, ours=ours))
        return list(names)

    def _target_names(self, source: FileAdapter, *, fused: bool, ours: bool) -> Iterator[str]:
        last = source.module.target.rpartition(".")[2]
        if len(source.outputs) > 1 and not self.split[source.kind] and fused:
            yield last
        elif "" in source.outputs:
            yield source.module.ours if ours or last not in NAMES else last
        else:
            yield from (PART_TARGETS[part] for part in source.outputs)

    def _of(self, spec: AdapterSpec) -> set[str]:
        table = get_table(self.model, tp=1, adapter=spec)
        return {w.name.removesuffix(".A.weight") for w in table.weights() if w.name.endswith(".A.weight")}

    def _wanted(self, spec: AdapterSpec) -> set[str]:
        return {name for source in self.sources for name, *_ in self._ours(source, self._of(spec))}

    def _ours(self, source: FileAdapter, known: set[str]) -> Iterator[tuple[str, range, slice]]:
        """Each adapter of ours that one of the file becomes: its name, the rows of the file's B, columns of it."""
        fused = adapter_name(source.module.product)
        if "" in source.outputs or (fused in known and not self.split[source.kind]):
            rows = range(len(source.rows))
            yield fused, rows, slice(None)
            return
        for number, (part, rows) in enumerate(source.outputs.items()):
            rank = self._rank(source)
            columns = slice(number * rank, (number + 1) * rank) if self.split.get(source.kind) else slice(None)
            yield adapter_name(source.module.product, part), rows, columns

    def _made(self) -> dict[str, tuple[FileAdapter, range, slice]]:
        known = self._of(self.spec)
        made = {n: (source, rows, columns) for source in self.sources for n, rows, columns in self._ours(source, known)}
        ranks = {self._rank(source) for source in self.sources}
        if len(ranks) > 1:
            self.notes.append(
                f"ranks {', '.join(map(str, sorted(ranks)))} become {self.spec.rank}, filled up with zeros"
            )
        if lacking := len(known - made.keys()):
            if self.spec.kind == "dora":
                message = f"{lacking} modules of these targets have no adapter, and DoRA's lengths cannot be left out"
                hint = "merge it with peft, merge_and_unload(), and start from the merged weights"
                raise InputError.of("adapter-unsupported", str(self.folder.config.path), message, hint)
            self.notes.append(f"{lacking} adapters of these targets are not in the file and are zeros")
        return made

    def entries(self) -> list[Entry]:
        """The tensors of a checkpoint, each made when its turn comes."""
        entries: list[Entry] = []
        saved = {name: stored for stored, name in self.saved.items()}
        dtype = widest(tensor.dtype for tensor in self.folder.tensors.values())
        table = get_table(self.model, tp=1, adapter=self.spec)
        for weight in table.weights():
            if table.is_frozen(weight.name):
                continue
            stored = saved.get(weight.name)
            kind = dtype if stored is None else self.folder.tensors[stored].dtype
            make = partial(self._tensor, weight.name, weight.shape, stored)
            entries.append(Entry(f"{weight.name}/value", kind, weight.shape, partial(_padded, weight.shape, make)))
        return entries

    def _tensor(self, name: str, shape: tuple[int, ...], stored: str | None) -> Tensor:
        """A parameter of ours, without padding. stored: the tensor of a module that was trained in full."""
        if stored is not None:
            return self.folder.read(stored)
        adapter, _, kind = name.removesuffix(".weight").rpartition(".")
        if adapter not in self.made:
            return torch.zeros(())
        source, rows, columns = self.made[adapter]
        if kind == MAGNITUDE:
            return self._in_our_order(source, self.folder.read(source.magnitude))[rows.start : rows.stop]
        down, up = self._factors(source)
        if kind == "A":
            return down[..., columns, :]
        part = up[..., rows.start : rows.stop, columns]
        if len(shape) > part.dim():  # [E, 2f, r] -> [E, 2, f, r]
            part = part.unflatten(1, shape[1:-1])
        return part if source.scale == self.spec.scale else part * (source.scale / self.spec.scale)

    def _factors(self, source: FileAdapter) -> tuple[Tensor, Tensor]:
        """A [r, i] and B [o, r] of an adapter of the file, with a dimension of experts before where there are any; rows
        of B in our order."""
        experts, read = source.module.experts, self.folder.read
        if experts and len(source.names) == 1:
            down, up = (read(name) for name in source.names[0])
            down = down.unflatten(0, (experts, -1))  # [E r, i] -> [E, r, i]
            return down, up.unflatten(1, (-1, experts)).permute(2, 0, 1)  # [o, r E] -> [E, o, r]
        if experts:
            return torch.stack([read(a) for a, _ in source.names]), torch.stack([read(b) for _, b in source.names])
        down, up = (read(name) for name in source.names[0])
        return down, self._in_our_order(source, up)

    def _in_our_order(self, source: FileAdapter, rows: Tensor) -> Tensor:
        pairs = source.module.pairs
        return rows if pairs is None else rows[rows_of_pairs(range(len(rows)), *pairs)]


def _padded(shape: tuple[int, ...], make: Callable[[], Tensor]) -> Tensor:
    """A tensor filled up with zeros."""
    part = make()
    if part.shape == shape:
        return part
    found = torch.zeros(shape, dtype=part.dtype)
    if part.dim():
        found[tuple(slice(size) for size in part.shape)] = part
    return found


def _sources(folder: PeftFolder, module: PeftModule, issues: list[Issue]) -> Iterator[FileAdapter]:
    """The adapters in the file of one module."""
    if module.experts:
        yield from _expert_sources(folder, module, issues)
        return
    key = f"{PREFIX}{module.name}"
    pair = (f"{key}.lora_A.weight", f"{key}.lora_B.weight")
    if not folder.tensors.keys() & set(pair):
        return
    rank = _rank_of(folder, module.target, pair, (len(module.rows), module.inputs), 1, issues)
    if rank is None:
        return
    length = f"{key}.lora_magnitude_vector"
    if folder.config.dora and folder.tensors.get(length, None) is None:
        issues.append(Issue("adapter-shape", str(folder.path / TENSORS), f"{length} is missing, use_dora is true"))
    scale = folder.config.scale_of(module.target, rank)
    yield FileAdapter(
        module, module.rows, (pair,), rank, scale, length * folder.config.dora, _outputs(module, module.rows)
    )


def _expert_sources(folder: PeftFolder, module: PeftModule, issues: list[Issue]) -> Iterator[FileAdapter]:
    sizes, file = (len(module.rows), module.inputs), str(folder.path / TENSORS)
    for key in (f"{PREFIX}{module.name}.base_layer", f"{PREFIX}{module.name}"):
        pair = (f"{key}.lora_A.weight", f"{key}.lora_B.weight")
        down, up = (folder.tensors.get(name) for name in pair)
        if down is None or up is None or (up.shape[0], down.shape[-1]) != sizes:  # of the other parameter
            continue
        if (rank := _rank_of(folder, module.target, pair, sizes, module.experts, issues)) is not None:
            scale = folder.config.scale_of(module.target, rank)
            yield FileAdapter(module, module.rows, (pair,), rank, scale, outputs=_outputs(module, module.rows))
        return
    count = len(module.apart[0])
    height = len(module.rows) // count
    for number in range(count):
        names = [_apart(folder, expert[number]) for expert in module.apart]
        present = [pair for pair in names if pair[0] in folder.tensors]
        if not present:
            continue
        if len(present) < len(names):
            lacking = next(pair[0] for pair in names if pair[0] not in folder.tensors)
            issues.append(Issue("adapter-shape", file, f"{lacking} is missing, other experts have it"))
            continue
        target = module.apart[0][number]
        ranks = {_rank_of(folder, target, pair, (height, module.inputs), 1, issues) for pair in names}
        if None in ranks or len(ranks) > 1:
            continue
        (rank,) = ranks
        assert rank is not None
        rows = range(number * height, (number + 1) * height)
        scale = folder.config.scale_of(target, rank)
        yield FileAdapter(module, rows, tuple(names), rank, scale, outputs=_outputs(module, rows))


def _apart(folder: PeftFolder, name: str) -> tuple[str, str]:
    """The names of A and B of one expert's matrix."""
    return f"{PREFIX}{name}.lora_A.weight", f"{PREFIX}{name}.lora_B.weight"


def _outputs(module: PeftModule, rows: range) -> dict[str, range]:
    """The outputs of the product in some of its rows, where they are counted from the first of these; '' for a product
    with one output."""
    named = {part: span for part, span in module.outputs.items() if part} or module.outputs
    inside = {part: span for part, span in named.items() if span.start >= rows.start and span.stop <= rows.stop}
    return {part: range(span.start - rows.start, span.stop - rows.start) for part, span in inside.items()}


def _rank_of(
    folder: PeftFolder, target: str, pair: tuple[str, str], sizes: tuple[int, int], experts: int, issues: list[Issue]
) -> int | None:
    """The rank of an adapter of [out, in], None where its tensors do not fit, with an issue."""
    rows, inputs = sizes
    stored = [folder.tensors.get(name) for name in pair]
    rank = folder.config.rank_of(target)
    wanted = ((rank * experts, inputs), (rows, rank * experts))
    for name, found, shape in zip(pair, stored, wanted, strict=True):
        if found is None or found.shape != shape:
            held = "missing" if found is None else str(list(found.shape))
            message = f"{name} is {held}, rank {rank} and the base need {list(shape)}"
            hint = "name the base that it was trained on: --base"
            issues.append(Issue("adapter-shape", str(folder.path / TENSORS), message, hint))
            return None
    return rank


def _saved_modules(folder: PeftFolder, model: ModelSpec, issues: list[Issue]) -> dict[str, str]:
    """Tensors of modules_to_save, and the parameters of ours that they are."""
    pieces = {piece.name: (row, piece) for row in rows_of(model).values() for piece in row.pieces}
    found: dict[str, str] = {}
    for name, tensor in folder.tensors.items():
        row, piece = pieces.get(name.removeprefix(PREFIX), (None, None))
        if row is None or piece is None:
            continue
        spec = AdapterSpec(modules_to_save=[module.rpartition(".")[2] for module in folder.config.saved])
        if get_table(model, tp=1, adapter=spec).is_frozen(row.name) or len(row.pieces) > 1 or piece.transposed:
            message = f"{name} was trained in full, which mpctl does for lm_head and embed_tokens"
            hint = "merge it with peft, merge_and_unload(), and start from the merged weights"
            issues.append(Issue("adapter-unsupported", str(folder.path / TENSORS), message, hint))
        elif tensor.shape != piece.shape:
            message = f"{name} is {list(tensor.shape)}, the base needs {list(piece.shape)}"
            issues.append(Issue("adapter-shape", str(folder.path / TENSORS), message))
        found[name] = row.name
    return found
