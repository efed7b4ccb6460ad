"""The launcher backends that `--on` names: how the ranks of a plan get onto hosts.

    backend.py     what a backend offers, and what a scheduler that takes submissions does
    registry.py    the backend of a job, by name or by where this process runs
    connect.py     the checks before hosts are reached, and a launch that is ready on them
    local.py       all ranks below this process, on this host
    ssh/           a node agent on each host of a hostfile, by the system's ssh client
    slurm/         a node agent on each host of an allocation, by srun; batch scripts, by sbatch
    kubernetes/    manifests for Kubeflow, submitted by kubectl
    torchrun/      a world that another program started: this process is one of its nodes or ranks

The supervisor sees the Cluster that a backend's `connect` returns (run/launch/cluster.py) and nothing
else of it. A backend that starts node agents makes that Cluster by run/launch/control/cluster.py and
only provides the hosts and the command that starts an agent there.
"""
