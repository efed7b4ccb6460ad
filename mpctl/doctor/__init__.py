"""`mpctl doctor`: what every host offers, how fast hosts reach each other, what would
break a launch.

    documents.py      what a host reports about itself, as strict types (JSON between processes)
    probe.py          the process that measures one host: `python -m mpctl.doctor.probe`
    software.py, hardware.py, gpus.py, network.py, filesystem.py   the probes, one topic each
    pair_schedule.py  which host is measured with which other host in which round
    pairs.py          the process that measures latency and bandwidth between two hosts
    collectives.py    the process that runs an all-reduce of torch on the ranks of one host
    hosts.py          running one of these processes on every host
    examine.py        all of it, in order
    needs.py          what a job needs of each host
    judge.py, judge_*.py   reports and needs -> findings; pure functions
    diagnosis.py      the whole result, schema mpctl.doctor/1
    redact.py         the same without host names, addresses and user names

A probe is a small function that runs on one host and returns one of the models of documents.py. It
may fail or hang (a dead network file system, a driver, a torch that crashes): each has a time
limit, torch has a process of its own, and a probe without a result is a finding, never a traceback.
"""
