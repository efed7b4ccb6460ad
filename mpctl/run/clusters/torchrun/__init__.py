"""`--on torchrun`: joining a world that torchrun, Kubeflow, srun or mpirun has started.

    world.py    the world in the environment, and whether it is the planned one
    meeting.py  where the processes of a world find the one that launches
    agent.py    the other processes, which obey the launcher
    backend.py  the world as the supervisor sees it

The first process becomes the launcher, with the supervisor of every other launch; all others become
its agents. A process represents a node, and then runs torchrun, or a single rank, and then runs
that rank's worker. Ranks are children of the world's processes, so that a failed rank can be
restarted without the program that started the world noticing.
"""
