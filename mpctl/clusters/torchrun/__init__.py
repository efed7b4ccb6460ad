"""`--on torchrun`: joining a world that torchrun, Kubeflow, srun or mpirun has started.

    world.py    what the environment says of the world, and whether it is the planned one
    meeting.py  where the processes of a world find the one that launches
    agent.py    the other processes: they do what the launcher says
    backend.py  the world as the supervisor sees it

The first process becomes the launcher, with the supervisor of every other launch; all others become
its agents. A process stands for a node, and then runs torchrun, or for a single rank, and then runs
that rank's worker. Ranks are children of the world's processes and not these themselves, so that a
rank that fails can be started again without the program that started the world noticing.
"""
