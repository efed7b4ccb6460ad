"""Pipeline schedules: the order of each stage's actions, their simulated times, and their messages.

orders.py      a stage's actions under each schedule, and where their results go
replay.py      those orders played with given times: makespan, idle time, activations held
program.py     the same orders with their sends and receives, for a worker to run as they stand
"""
