"""How the launcher and the node agents of other hosts talk: JSON lines over TCP.

    messages.py  the messages, and a connection that sends and receives them
    server.py    the launcher's end: one link for each host, kept alive by a thread
    cluster.py   the hosts as the supervisor sees them (launch/cluster.py)
    agent_attempt.py  one attempt on them

An agent (node/agent.py) connects to the launcher, never the other way round, and says hello with
the facts of its host and the launch's nonce, which it read from the shared run directory. The
launcher pings every PING_SECONDS. An end that hears nothing for SILENCE_SECONDS, or whose
connection closes, takes the other for lost: the agent then ends its ranks and itself, and the
launcher ends the attempt.

Whoever can read the run directory can read the nonce and take part. The connection is not
encrypted: like torch's own store it is meant for the network of a cluster.
"""
