"""What a launch over ssh needs besides the node agents: which hosts, which command, what failed.

    host_line.py   one line of a hostfile: `user@host slots=8 port=2222`
    hostfile.py    a whole hostfile
    selection.py   DeepSpeed's include and exclude, `n1:0,2@n2`; the hosts that a plan gets
    command.py     the ssh command that runs a program on a host, and the variables it takes along
    failures.py    why an ssh ended: its message and exit code as an issue with a way out

All of it computes without effects, but for reading the hostfile; backend.py starts processes.
"""
