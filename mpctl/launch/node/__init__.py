"""What runs on each host of a launch, and what is known of a host.

    machine.py    what this host is: cores, GPUs, free memory, versions
    host.py       whether hosts suffice for a plan
    network.py    where ranks meet, which interface leads to other hosts
    torchrun.py   the environment of a rank, the command that starts all ranks, one attempt
    processes.py  the processes of an attempt: their states, stacks, and their end
    agent.py      does all that for a launcher on another host

Where all ranks run on the launcher's host, it uses these files itself (backends/local.py).
"""
