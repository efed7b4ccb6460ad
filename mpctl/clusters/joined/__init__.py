"""Joining a world that another program has started: torchrun, Kubeflow, srun, mpirun.

    world.py         what the environment of this process says of the world
    checks.py        whether that world is the one that the plan needs
    place.py         what every process says of itself, and the hosts that follow from it
    meeting.py       where the processes of a world find the one that launches
    agent.py         the other processes: they do what the launcher says
    rank_process.py  one rank as a child, where the world has a process a rank
    restarted.py     pods that Kubernetes starts again although their launch has ended
    cluster.py       the world as the supervisor sees it

The first process becomes the launcher, with the supervisor of every other launch; all others become
its agents. A process stands for a node, and then runs torchrun, or for a single rank, and then runs
that rank's worker. Ranks are children of the world's processes and not these themselves, so that a
rank that fails can be started again without the program that started the world noticing.
"""
