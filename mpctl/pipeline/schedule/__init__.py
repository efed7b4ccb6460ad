"""The order of a pipeline's work: what a stage does, when it would, and which messages that takes.

orders.py      a stage's actions under each schedule, and where their results go
replay.py      those orders played with given times: makespan, idle time, activations held
program.py     the same orders with their sends and receives, for a worker to run as they stand
"""
