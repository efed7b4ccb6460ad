"""How bytes travel between ranks: groups that count what they send, and shared memory on one host.

To add a collective, such as the all-to-all of expert parallelism: a method of `Group` (group.py),
its steps in shared memory (a class in messages.py) and the method of `Exchange` (shared.py) that
starts them. All traffic is counted in `Group`, and a plan counts it in estimate/.
"""
