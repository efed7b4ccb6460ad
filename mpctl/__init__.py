"""Plan a parallel transformer layout, then launch exactly that layout.

These names are the library: `from mpctl import load_plan, Topology`. Everything else may move
between versions. A name is imported when it is first used, so that `import mpctl` imports neither
torch nor pydantic, and the planning names never import torch. `__init__.pyi` declares the same for
type checkers.
"""

from importlib import import_module

__version__ = "0.1.0"

PUBLIC = {
    "mpctl.core.errors": ("DoesNotFit", "InputError", "Issue"),
    "mpctl.core.topology": ("Topology",),
    "mpctl.spec.job": ("JobSpec",),
    "mpctl.spec.cluster": ("ClusterSpec", "DeviceSpec", "LinkSpec"),
    "mpctl.spec.model": ("ModelSpec",),
    "mpctl.spec.parallel": ("ParallelSpec",),
    "mpctl.spec.training": ("TrainingSpec",),
    "mpctl.spec.load": ("load_job",),
    "mpctl.model.layout.job_layout": ("JobLayout",),
    "mpctl.plan.planning.plan": ("Plan", "load_plan", "make_plan"),
    "mpctl.plan.search.result": ("SearchResult", "search_layouts"),
    "mpctl.records.rundir.heartbeat": ("heartbeat", "stop_requested"),
    "mpctl.train.transport.group": ("Group",),
    "mpctl.train.layers.linear": ("ColumnParallelLinear", "RowParallelLinear"),
    "mpctl.train.layers.attention": ("AttentionConfig",),
    "mpctl.train.layers.config": ("LayerConfig",),
    "mpctl.train.layers.mlp": ("MLPConfig",),
    "mpctl.train.layers.shard_context": ("ShardContext",),
    "mpctl.train.layers.transformer_layer": ("ParallelTransformerLayer",),
    "mpctl.train.layers.embedding": ("VocabParallelEmbedding",),
}
_MODULE_OF = {name: module for module, names in PUBLIC.items() for name in names}
__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> object:
    """The public name, imported from its module on first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mpctl' has no public name {name!r}; mpctl.__all__ lists all")
    found: object = getattr(import_module(_MODULE_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
