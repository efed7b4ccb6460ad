"""The records of a checkpoint: its manifest, and of each shard which part of which parameter it
holds and the checksums of its file.

Each record is one class, which writes and reads it. Input is untrusted: bounds are checked, and
names of files can only be those of shards.

A checkpoint is a directory step-N with

    manifest.json            schema mpctl.checkpoint/3: step, shards with their coordinates, save
    shard-K.safetensors      the tensors of one rank
    shard-K.json             size and checksums of that file; which part of which parameter it holds
    job.json, plan.json      copies of the run's

Older versions wrote only the number of shards and tp, of which pipeline stage S has the shards S *
tp to (S + 1) * tp - 1 (mpctl.checkpoint/2), and one dimension that is split (/1). Both are read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from mpctl.core.durable import write_whole
from mpctl.core.errors import InputError
from mpctl.core.shard import Shard
from mpctl.records.checkpoint.folder import STEP, list_checkpoints

SCHEMA = "mpctl.checkpoint/3"
OLDER_SCHEMAS = ("mpctl.checkpoint/1", "mpctl.checkpoint/2")
MANIFEST = "manifest.json"
MOST_SHARDS = 1 << 20

OnBytes = Callable[[int], None]
"""Called with the number of bytes that were read or written since the last call."""
Maximum = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fp8Histories = dict[str, list[Annotated[list[Maximum], Field(min_length=3, max_length=3)]]]
"""By linear layer, the largest elements of X, W and dY in the last steps
(train/layers/fp8.py)."""
RouterBias = dict[str, list[Annotated[float, Field(allow_inf_nan=False)]]]
"""By layer with experts (`layers.3.mlp`), the correction bias of each expert, fp32 values."""


class ShardFile(BaseModel):
    """A shard as the manifest lists it. name: of its files, without their suffixes; coords: of the
    rank that wrote it, along the axes over which shards differ."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    name: Annotated[str, Field(pattern=r"^shard-[0-9]{1,9}$")]
    coords: dict[str, NonNegativeInt]

    @property
    def index(self) -> int:
        return int(self.name.removeprefix("shard-"))

    @property
    def stage(self) -> int:
        return self.coords.get("pp", 0)

    def path(self, folder: Path) -> Path:
        return folder / f"{self.name}.safetensors"

    def record_path(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"


ManifestTables = Mapping[str, Any]
"""Fields of a manifest that every rank knows, by name: loss_scale, fp8, router_bias and so on."""


class BaseReference(BaseModel):
    """The weights that a checkpoint of adapters alone adds to: their path, and a digest of their values
    (train/weights/values.py)."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """manifest.json. step: steps done. loss_scale: state of the fp16 loss scale
    (train/runtime/update.py), empty for other dtypes; fp8: empty without delayed scaling; router_bias:
    empty without model.router_bias; router_counts: by layer with experts, the tokens of the last
    step by expert, empty unless moe_load_balancing is "global"; save: a random name of the save
    that wrote it, which distinguishes two saves of one step, empty without a save (older versions,
    resharded and imported checkpoints); base: of adapters whose frozen base is not saved again."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    step: NonNegativeInt
    shards: Annotated[list[ShardFile], Field(min_length=1, max_length=MOST_SHARDS)]
    save: str = ""
    loss_scale: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    fp8: Fp8Histories = {}
    router_bias: RouterBias = {}
    router_counts: dict[str, list[NonNegativeInt]] = {}
    base: BaseReference | None = None

    @property
    def updates(self) -> int:
        """Steps that changed the parameters, for a checkpoint that does not count them by
        parameter."""
        return self.step - int(self.loss_scale.get("skipped", 0))

    def size(self, axis: str) -> int:
        """Ranks along an axis of the layout that wrote it, as far as shards differ along it."""
        return 1 + max(shard.coords.get(axis, 0) for shard in self.shards)

    def write(self, folder: Path) -> None:
        document = self.model_dump(exclude_defaults=True)
        write_json(folder / MANIFEST, {"schema": SCHEMA, **document})

    @model_validator(mode="after")
    def _is_consistent(self) -> Manifest:
        if len({shard.name for shard in self.shards}) < len(self.shards):
            raise ValueError("lists a shard twice")
        if not 0 <= self.updates <= self.step:
            raise ValueError(f"{self.updates} updates in {self.step} steps")
        return self


Blocks = list[tuple[NonNegativeInt, NonNegativeInt]]


class ParameterPlacement(BaseModel):
    """Part of a parameter that a shard holds.

    shape: of the full parameter; cuts: of each dimension that is split, the blocks [start, stop) in
    this shard, in the order of the file; updates: number of updates in the optimizer's moments.
    dim, blocks: written by version 1 in place of cuts.

    >>> ParameterPlacement.of(Shard((8, 4), {0: (range(4, 8),), 1: (range(2),)})).as_record()
    {'shape': [8, 4], 'cuts': {'0': [[4, 8]], '1': [[0, 2]]}}
    """

    model_config = ConfigDict(strict=True, extra="ignore")
    shape: list[NonNegativeInt]
    cuts: dict[NonNegativeInt, Blocks] | None = None
    dim: NonNegativeInt | None = None
    blocks: Blocks | None = None
    updates: NonNegativeInt | None = None

    @classmethod
    def of(cls, shard: Shard, *, updates: int | None = None) -> ParameterPlacement:
        cuts = {dim: [(b.start, b.stop) for b in blocks] for dim, blocks in shard.cuts.items()}
        return cls(shape=list(shard.shape), cuts=cuts, updates=updates)

    def as_record(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True)

    @cached_property
    def shard(self) -> Shard:
        """The part of the parameter. Raises ValueError where it leaves the shape or has an element
        twice."""
        cuts = self.cuts
        if cuts is None:
            cuts = {} if self.dim is None else {self.dim: self.blocks or []}
        by_dim = {dim: tuple(range(*block) for block in blocks) for dim, blocks in cuts.items()}
        return Shard(tuple(self.shape), by_dim)

    @model_validator(mode="after")
    def _is_a_part(self) -> ParameterPlacement:
        given = {name for name in ("dim", "blocks") if name in self.model_fields_set}
        if self.cuts is None and given != {"dim", "blocks"}:
            raise ValueError("has no cuts")
        if self.cuts is not None and given:
            raise ValueError(f"has cuts and {min(given)}")
        if self.dim is None and self.blocks:
            raise ValueError("has blocks, but no dimension that is split")
        _ = self.shard
        return self


class Checksums(BaseModel):
    """CRC-32 (zlib) of each block of a file, in order; the last block may be shorter.

    A rank of another layout reads some rows of a tensor, and checks the blocks that contain them.
    CRC-32 finds every burst of up to 32 wrong bits and all but one in 2^32 of other changes, at
    three times the speed of sha256.
    """

    model_config = ConfigDict(strict=True, extra="ignore")
    block_bytes: PositiveInt
    crc32: list[NonNegativeInt]


class FileDigest(BaseModel):
    """Size, sha256 in hexadecimal and block checksums of a file. checksums: version 0.1.0 wrote
    none."""

    model_config = ConfigDict(strict=True, extra="ignore")
    bytes: NonNegativeInt
    sha256: str
    checksums: Checksums | None = None


class ShardRecord(FileDigest):
    """shard-K.json: the digest of the file of tensors, which part of which parameter it holds, and
    the names of those that have only a value: frozen parameters, and buffers, which no optimizer
    steps."""

    parameters: dict[str, ParameterPlacement]
    frozen: list[str] = []

    @classmethod
    def of(cls, file: FileDigest, parameters: dict[str, ParameterPlacement], frozen: list[str]) -> ShardRecord:
        return cls(bytes=file.bytes, sha256=file.sha256, checksums=file.checksums, parameters=parameters, frozen=frozen)

    def write(self, path: Path) -> None:
        document = self.model_dump(mode="json", exclude_none=True)
        if not self.frozen:
            del document["frozen"]
        write_json(path, document)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON document; a crash leaves the file complete or absent."""
    write_whole(path, json.dumps(document, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises InputError when it is missing or damaged."""
    path = folder / MANIFEST
    try:
        document = json.loads(_read(path))
        schema = document["schema"]
        if schema in OLDER_SCHEMAS:
            document["shards"] = _numbered_shards(document["shards"], document.get("tp"))
        elif schema != SCHEMA:
            known = ", ".join((*OLDER_SCHEMAS, SCHEMA))
            raise ValueError(f"schema {schema!r}, expected one of {known}")
        return Manifest.model_validate(document)
    except ValidationError as error:
        raise damage_error(path, _first(error)) from None
    except json.JSONDecodeError as error:
        raise damage_error(path, str(error)) from None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise damage_error(path, f"{type(error).__name__}: {error}") from None


def _numbered_shards(shards: Any, tp: Any) -> list[dict[str, Any]]:
    """The list of shards of a manifest that has their number and tp; without tp there is a single
    stage."""
    tp = shards if tp is None else tp
    if type(shards) is not int or type(tp) is not int or not 0 < tp <= shards <= MOST_SHARDS:
        raise ValueError(f"{shards!r} shards of tp {tp!r}")
    if shards % tp:
        raise ValueError(f"{shards} shards is not a multiple of tp {tp}")
    return [{"name": f"shard-{k}", "coords": {"pp": k // tp, "tp": k % tp}} for k in range(shards)]


def save_of(folder: Path) -> str:
    """The name of the save that wrote a checkpoint; empty where it has none or cannot be read."""
    try:
        return read_manifest(folder).save
    except InputError:
        return ""


def read_shard_record(
    folder: Path, shard: ShardFile, *, hashed: bool = True, on_bytes: OnBytes | None = None
) -> ShardRecord:
    """The record of a shard. Raises InputError when record or file are damaged. hashed: compare
    the file's sha256, else only its size."""
    path = shard.record_path(folder)
    try:
        record = ShardRecord.model_validate_json(_read(path))
    except ValidationError as error:
        raise damage_error(path, _first(error)) from None
    path = shard.path(folder)
    try:
        size = path.stat().st_size
        if size != record.bytes:
            raise damage_error(path, f"has {size} bytes, {record.bytes} were written")
        if hashed and sha256(path, on_bytes) != record.sha256:
            raise damage_error(path, "its bytes are not those that were written (sha256 differs)")
    except OSError as error:
        raise damage_error(path, error.strerror or str(error)) from None
    return record


def sha256(path: Path, on_bytes: OnBytes | None = None) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 24):
            digest.update(chunk)
            if on_bytes is not None:
                on_bytes(len(chunk))
    return digest.hexdigest()


class CheckpointDamaged(InputError):
    """The bytes of the file at `path` of a checkpoint are not those that were written. folder: the
    checkpoint."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(damage_error(path, why).issues)
        self.folder = path.parent


def damage_error(path: Path, why: str) -> InputError:
    """An error about a damaged file of a checkpoint, or about the checkpoint itself."""
    folder = path if STEP.fullmatch(path.name) else path.parent
    step = STEP.fullmatch(folder.name)
    older = [
        saved
        for number, saved in list_checkpoints(folder.parent)
        if step is not None and number < int(step[1]) and (saved / MANIFEST).is_file()
    ]
    hint = f"restore {folder} from a backup; there is no checkpoint before it"
    if older:
        hint = f"name {older[-1]}, the checkpoint before it, or remove {folder}"
    return InputError.of("checkpoint-damaged", str(path), why, hint)


def _first(error: ValidationError) -> str:
    """The first mistake: `parameters.head.weight.blocks: Field required`."""
    first = error.errors()[0]
    return ": ".join([*([".".join(map(str, first["loc"]))] if first["loc"] else []), first["msg"]])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise damage_error(path, error.strerror or str(error)) from None
