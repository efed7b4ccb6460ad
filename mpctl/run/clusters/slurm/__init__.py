"""Slurm: an allocation as hosts of a launch, and runs as batch jobs.

Sources: the manual pages of sbatch, srun, sinfo, squeue and scontrol of Slurm 22.05; checked
against a running Slurm by tests/multinode/test_slurm.py.
"""
