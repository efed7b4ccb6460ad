"""How bytes travel between ranks: process groups that count what they send, shared memory on one
host."""
