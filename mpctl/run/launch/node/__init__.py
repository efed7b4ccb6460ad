"""Control of the processes on each host of a launch.

    torchrun.py   the environment of a rank, the command that starts all ranks, one attempt
    processes.py  the processes of an attempt: their states, stacks, and their end
    agent.py      does all that for a launcher on another host

If all ranks run on the launcher's host, it uses these files itself (run/clusters/local.py).
"""
