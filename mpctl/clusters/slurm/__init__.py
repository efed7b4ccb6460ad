"""Slurm: what its commands print and what they are given, as pure functions; one module runs them.

    node_list.py   `gpu[003-005,7]` -> the names of the nodes
    times.py       `1-12:00:00` -> seconds, and back
    partitions.py  sinfo's listing -> partitions and their nodes; whether they suffice for a plan
    limits.py      whether a time limit suffices for a checkpoint; when Slurm signals its end
    options.py     launch.slurm.extra: options of sbatch, checked and quoted
    submission.py  a plan and sinfo's listing -> what is asked for, and what is wrong with it
    script.py      that -> the batch script
    allocation.py  the allocation that this process runs in; the srun step of the node agents
    job_state.py   squeue's listing -> the state of one job
    commands.py    the only module here that runs Slurm's commands

backend.py puts them together. Sources: the manual pages of sbatch, srun, sinfo, squeue and
scontrol of Slurm 22.05; checked against a running Slurm by tests/multinode/test_slurm.py.
"""
