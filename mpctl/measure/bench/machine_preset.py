"""The presets of a measured machine: a device and a cluster, as TOML with their sources.

FOLDER/devices/NAME.toml has the device, FOLDER/clusters/NAME.toml the cluster, which names the
device's file: `mpctl plan --cluster FOLDER/clusters/NAME.toml` reads both, and so does
`--cluster NAME` where MPCTL_PRESETS names FOLDER. Numbers have four significant digits, more than
measurements repeat, and comments with their sources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpctl.core.durable import write_whole
from mpctl.core.errors import InputError
from mpctl.core.units import plural
from mpctl.measure.bench.machine_fit import DeviceFit, LinkFit
from mpctl.measure.bench.report import BenchEnvironment
from mpctl.measure.calibrate.own_fit import OwnFit
from mpctl.measure.calibrate.runs import get_value, with_value
from mpctl.measure.calibrate.write import number
from mpctl.records.rundir.directory import cannot_write
from mpctl.spec.cluster import ClusterSpec, DeviceSpec

Comments = Mapping[str, str]  # by dotted path


def preset_text(table: Mapping[str, Any], *, head: Sequence[str], comments: Comments) -> str:
    """The table as TOML. head: lines of a comment at its beginning; comments: to the right of a
    value, by its dotted path. Values are texts, numbers, truth values and tables of those.

    >>> preset_text({"nodes": 1}, head=["measured"], comments={"nodes": "this one"})
    '# measured\\nnodes = 1  # this one\\n'
    """
    return "\n".join([*(f"# {line}" for line in head), *_lines(table, "", comments)]) + "\n"


def _lines(table: Mapping[str, Any], prefix: str, comments: Comments) -> Iterator[str]:
    values = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    for key, value in values.items():
        comment = comments.get(prefix + key)
        yield f"{key} = {_value(value)}" + (f"  # {comment}" if comment else "")
    for key, inner in table.items():
        if isinstance(inner, Mapping) and inner:
            yield ""
            yield f"[{prefix}{key}]"
            yield from _lines(inner, f"{prefix}{key}.", comments)


def _value(value: object) -> str:
    if isinstance(value, float):
        return number(value)
    return json.dumps(value, ensure_ascii=False)  # of texts, integers and truth values also TOML


PRESETS = "presets"  # in the folder of a bench
FITTED = "moved by training runs from {before}"
UNMOVED = 0.005  # relative: less is not mentioned


@dataclass(frozen=True)
class MachinePreset:
    """A measured machine. name: of its files; head: lines at the beginning of both; comments: by
    kind of preset (devices, clusters) and dotted path."""

    name: str
    cluster: ClusterSpec
    head: tuple[str, ...]
    comments: Mapping[str, Mapping[str, str]]

    @property
    def device(self) -> DeviceSpec:
        """One of its devices, with the figures of its kernels."""
        assert self.cluster.device is not None, "a measured cluster has a device"
        return self.cluster.device

    def settings(self) -> dict[str, Any]:
        """The cluster as the setting `cluster` of a job, with all its figures."""
        return self.cluster.model_dump(mode="json", exclude_none=True)

    def texts(self) -> dict[str, str]:
        """The TOML of both files, by their path in a folder of presets."""
        device = self.device.model_dump(mode="json", exclude_defaults=True)
        own = self.cluster.model_dump(mode="json", exclude_defaults=True, exclude={"device"})
        named = {"name": own.pop("name"), "device": f"../devices/{self.name}.toml", **own}
        tables = {"devices": device, "clusters": named}
        return {
            f"{kind}/{self.name}.toml": preset_text(table, head=self.head, comments=self.comments.get(kind, {}))
            for kind, table in tables.items()
        }

    def write(self, folder: Path) -> list[Path]:
        """Write both files below a folder of presets; returns their paths. Raises InputError where
        they cannot be written."""
        paths = []
        for name, text in self.texts().items():
            path = folder / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, text)
            except OSError as error:
                raise cannot_write(path, error) from None
            paths.append(path)
        return paths

    def of_runs(self, runs: int, wanted: int) -> MachinePreset:
        """The same; its files state if fewer training runs than wanted finished."""
        if runs == wanted:
            return self
        line = f"Not complete: {runs} of {plural(wanted, 'training run')} came to their end."
        return replace(self, head=(*self.head, line))

    def with_fit(self, fit: OwnFit) -> MachinePreset:
        """The preset with the figures that training runs corrected, and the remaining spread."""
        cluster = self.cluster
        comments = {kind: dict(self.comments.get(kind, {})) for kind in ("devices", "clusters")}
        for constant, value in fit.values.items():
            path = f"device.{constant.path}" if constant.kind == "devices" else constant.path
            before = get_value(cluster, path)
            cluster = with_value(cluster, path, value)
            if abs(value / before - 1) > UNMOVED:
                own = comments[constant.kind]
                note = FITTED.format(before=number(before))
                own[constant.path] = "; ".join(filter(None, (own.get(constant.path), note)))
        cluster = cluster.model_copy(update={"spread": round(fit.spread, 4)})
        comments["clusters"]["spread"] = f"{plural(len(fit.left_out), 'layout')}, each left out"
        return replace(self, cluster=cluster, comments=comments)


def machine_preset(
    name: str, device: DeviceFit, link: LinkFit | None, environment: BenchEnvironment, *, per_node: int
) -> MachinePreset:
    """The preset of a machine from its measured device and link.

    link: None where there is a single device. per_node: devices (CPU cores, GPUs) of a node.
    """
    spec = device.device
    what = plural(per_node, "core" if spec.is_cpu else "GPU")
    cluster = ClusterSpec(
        name=f"{name}: {what} of {environment['machine'] if spec.is_cpu else spec.name}",
        gpus_per_node=per_node,
        cores=per_node if spec.is_cpu else None,
        device=spec,
        intra_node=None if link is None else link.link,
        step_factor=1.0,
        source=measured_source(environment),
    )
    links = {"step_factor": "its kernels and links were measured with mpctl itself"}
    if link is not None:
        links |= {f"intra_node.{key}": comment for key, comment in link.comments.items()}
    return MachinePreset(name, cluster, tuple(head_lines(environment)), {"devices": device.comments, "clusters": links})


def measured_source(environment: BenchEnvironment) -> str:
    """Return the `source` of the presets: machine, date and versions, in a sentence."""
    return (
        f"Measured by mpctl bench machine on {environment['host']} ({environment['machine']}), "
        f"{environment['date'][:10]}, torch {environment['torch']}, mpctl {environment['mpctl']}."
    )


def head_lines(environment: BenchEnvironment) -> Sequence[str]:
    """The comment at the beginning of both files."""
    return (
        f"Measured by `mpctl bench machine` on {environment['date']}, host {environment['host']}:",
        f"{environment['machine']}, {plural(environment['cores'], 'core')}, "
        f"{plural(environment['gpus'], 'GPU')}, load average {environment['load_at_start']:.2f};",
        f"Python {environment['python']}, torch {environment['torch']}, mpctl "
        f"{environment['mpctl']}. Figures without a comment are as in the preset it began from.",
    )


def check_name(name: str) -> None:
    """Raises InputError where no preset's file may have this name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name) or name.endswith(".toml"):
        raise InputError.of(
            "bad-name", "NAME", f"{name!r} is no name of a preset", "letters, digits, - and _, such as my-laptop"
        )
