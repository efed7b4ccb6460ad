"""Launcher backends: how the ranks of a plan get onto hosts.

    local.py       all ranks below this process, on this host
    ssh.py         a node agent on each host of a hostfile, by the system's ssh client
    slurm.py       a node agent on each host of an allocation, by srun; batch scripts, by sbatch
    torchrun.py    a world that another program started: this process is one of its nodes or ranks
    scheduled.py   what a scheduler says of a submitted job, for `mpctl status` and `mpctl stop`
    kubernetes.py  manifests for Kubeflow, submitted by kubectl

A backend is one file. It offers what the class Backend says (backend.py), and nothing else of
mpctl knows which one runs: the supervisor sees the Cluster that `connect` returns. A backend that
starts node agents makes that Cluster by control/cluster.py and itself only says which hosts there
are and which command starts an agent there. `backends.registry` finds a backend by its name.
"""
