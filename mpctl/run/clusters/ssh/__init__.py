"""A node agent on each host of a hostfile, started by the system's ssh client."""
