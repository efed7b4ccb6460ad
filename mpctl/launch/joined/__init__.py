"""Joining a world that another program has started: torchrun, Kubeflow, srun, mpirun.

world.py    what the environment of this process says of the world, and its process in it
checks.py   whether that world is the one that the plan needs
"""
