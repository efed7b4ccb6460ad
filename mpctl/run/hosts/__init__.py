"""Facts of machines: what a host has, how it is reached, whether it suffices for a plan.

    machine.py   this host: cores, GPUs, free memory, versions
    network.py   where ranks meet, which interface leads to other hosts
    checks.py    what hosts lack to run a plan
    modules.py   modules of mpctl as child processes

The launcher, its node agents and `mpctl doctor` measure a host by these functions.
"""
