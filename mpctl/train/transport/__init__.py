"""Communication between ranks: groups that count their messages, and shared memory on one host.

To add a collective: a method of `Group` (group.py), one of `Exchange` (exchange.py) for ranks that
share memory, and its word in the collective log (records/rundir/collective_log.py). All traffic is counted
in `Group`; a plan counts it in estimate/.
"""
