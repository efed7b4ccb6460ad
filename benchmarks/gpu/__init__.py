"""Training on one GPU, measured: `python -m benchmarks.gpu` (also `make gpu`).

smoke.py      the first minute: does each thing work? smoke_checks.py has what
shapes.py     the models, and FLOP a token
peer.py       the same models in plain torch, one process a run
data.py       token files, made in seconds
ours.py       the same as `mpctl launch` runs them
cases.py      which of them are compared, in which order, and which fit a budget of time
processes.py  processes that end with all that they started
report.py     tables of benchmarks/results/gpu.md
__main__.py   the cases, within the budget; the tests marked gpu if asked for
"""
