"""`mpctl doctor`: what every host offers, how fast hosts reach each other, what would
break a launch.

    documents.py      requests to hosts, their reports, the result (mpctl.doctor/1)
    probe.py          the process that measures one host: `python -m mpctl.run.doctor.probe`
    filesystem.py     its probe of the run directory
    pairs.py          the process that measures latency and bandwidth between two hosts
    collectives.py    the process that runs an all-reduce of torch on the ranks of one host
    hosts.py          the hosts, and running one of these processes on all of them
    examine.py        all of it, in order
    job.py            what a job needs of each host, and what a host lacks for it
    host_findings.py  what is wrong with one host by itself
    findings.py       what is wrong with all of them
    redact.py         the result without host names, addresses and user names

A probe is a small function that runs on one host and returns one of the models of documents.py. It
may fail or hang (a dead network file system, a driver, a torch that crashes): each has a time
limit, torch has a separate process, and a probe without a result is a finding, never a traceback.
"""
