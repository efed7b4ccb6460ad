"""Types of the public names of `mpctl`, for type checkers; tests/test_public.py compares with __init__.py."""

from mpctl.core.errors import DoesNotFit as DoesNotFit
from mpctl.core.errors import InputError as InputError
from mpctl.core.errors import Issue as Issue
from mpctl.core.topology import Topology as Topology
from mpctl.model.layout.job_layout import JobLayout as JobLayout
from mpctl.plan.planning.plan import Plan as Plan
from mpctl.plan.planning.plan import load_plan as load_plan
from mpctl.plan.planning.plan import make_plan as make_plan
from mpctl.plan.search.result import SearchResult as SearchResult
from mpctl.plan.search.result import search_layouts as search_layouts
from mpctl.records.rundir.heartbeat import heartbeat as heartbeat
from mpctl.records.rundir.heartbeat import stop_requested as stop_requested
from mpctl.spec.cluster import ClusterSpec as ClusterSpec
from mpctl.spec.cluster import DeviceSpec as DeviceSpec
from mpctl.spec.cluster import LinkSpec as LinkSpec
from mpctl.spec.job import JobSpec as JobSpec
from mpctl.spec.load import load_job as load_job
from mpctl.spec.model import ModelSpec as ModelSpec
from mpctl.spec.parallel import ParallelSpec as ParallelSpec
from mpctl.spec.training import TrainingSpec as TrainingSpec
from mpctl.train.layers.attention import AttentionConfig as AttentionConfig
from mpctl.train.layers.config import LayerConfig as LayerConfig
from mpctl.train.layers.embedding import VocabParallelEmbedding as VocabParallelEmbedding
from mpctl.train.layers.linear import ColumnParallelLinear as ColumnParallelLinear
from mpctl.train.layers.linear import RowParallelLinear as RowParallelLinear
from mpctl.train.layers.mlp import MLPConfig as MLPConfig
from mpctl.train.layers.shard_context import ShardContext as ShardContext
from mpctl.train.layers.transformer_layer import ParallelTransformerLayer as ParallelTransformerLayer
from mpctl.train.transport.group import Group as Group

__version__: str
__all__: list[str]
PUBLIC: dict[str, tuple[str, ...]]
