"""Environments of processes that other programs started, as those programs set them."""

from __future__ import annotations

Environment = dict[str, str]


def torchrun_world(rank: int, nodes: int = 2, per_node: int = 4) -> Environment:
    """A rank of torchrun (torch 2.13), and what it is told of the nodes."""
    return {
        "RANK": f"{rank}", "LOCAL_RANK": f"{rank % per_node}", "WORLD_SIZE": f"{nodes * per_node}",
        "LOCAL_WORLD_SIZE": f"{per_node}", "GROUP_RANK": f"{rank // per_node}",
        "GROUP_WORLD_SIZE": f"{nodes}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
    }  # fmt: skip


def pod(node: int, nodes: int = 2, per_node: str = "4") -> Environment:
    """A pod of a TrainJob."""
    return {
        "PET_NNODES": f"{nodes}", "PET_NPROC_PER_NODE": per_node, "PET_NODE_RANK": f"{node}",
        "PET_MASTER_ADDR": "llama-node-0-0.llama", "PET_MASTER_PORT": "29500",
    }  # fmt: skip


def pytorch_pod(node: int, nodes: int = 2, per_node: str = "4") -> Environment:
    """A pod of a PyTorchJob, which also has RANK and WORLD_SIZE: of the node, and of all ranks."""
    size = int(per_node) * nodes if per_node.isdecimal() else nodes
    return {**pod(node, nodes, per_node), "RANK": f"{node}", "WORLD_SIZE": f"{size}",
            "MASTER_ADDR": "llama-master-0", "MASTER_PORT": "23456"}  # fmt: skip


def task(process: int, nodes: int = 2, per_node: int = 4, *, cyclic: bool = False) -> Environment:
    """A task of a Slurm step; cyclic: tasks are dealt to the nodes in turn. The job is larger."""
    node = process % nodes if cyclic else process // per_node
    local = process // nodes if cyclic else process % per_node
    return {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "64", "SLURM_NNODES": "16",
        "SLURM_STEP_NUM_TASKS": f"{nodes * per_node}", "SLURM_STEP_NUM_NODES": f"{nodes}",
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})", "SLURM_PROCID": f"{process}",
        "SLURM_LOCALID": f"{local}", "SLURM_NODEID": f"{node}",
    }  # fmt: skip


def mpi_process(process: int, nodes: int = 2, per_node: int = 4) -> Environment:
    """A process of mpirun (Open MPI)."""
    return {
        "OMPI_COMM_WORLD_RANK": f"{process}", "OMPI_COMM_WORLD_SIZE": f"{nodes * per_node}",
        "OMPI_COMM_WORLD_LOCAL_RANK": f"{process % per_node}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": f"{per_node}",
    }  # fmt: skip
