"""How bytes travel between ranks: groups that count what they send, and shared memory on one host.

To add a collective: a method of `Group` (group.py), its steps in shared memory (a class in
messages.py), the method of `Exchange` (shared.py) that starts them and its word in the collective
log (rundir/collective_log.py). All traffic is counted in `Group`; a plan counts it in estimate/.
"""
