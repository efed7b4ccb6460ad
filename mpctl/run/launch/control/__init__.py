"""Communication between the launcher and the node agents of other hosts: JSON messages over TCP.

    messages.py  both ends prove that they know the launch's key; the messages and what protects
                 them; the agent's end of a connection
    admission.py connections before they have proved that they know the key
    server.py    the launcher's end: one link for each host, kept alive by a thread
    cluster.py   the hosts as the supervisor sees them (run/launch/cluster.py), an attempt on them

An agent (node/agent.py) connects to the launcher, never the other way round. Both prove that they
read the key of the launch in the shared run directory; then the agent says hello with the facts of
its host. The launcher pings every PING_SECONDS. An end that hears nothing for
`launch.silence_seconds`, or whose connection closes, considers the other lost: the agent then ends
its ranks and exits, and the launcher ends the attempt.

Whoever can read the run directory can take part. The connection is not encrypted
(docs/security.md).
"""
