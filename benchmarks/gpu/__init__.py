"""Training on one GPU, measured: `python -m benchmarks.gpu` (also `make gpu`).

shapes.py     the models, and FLOP a token
peer.py       the same models in plain torch, one process a run
ours.py       the same as `mpctl launch` runs them
cases.py      which of them are compared, in which order, and which fit a budget of time
processes.py  processes that end with all that they started
report.py     tables of docs/gpu.md
__main__.py   the tests marked gpu, then the cases, within the budget
"""
