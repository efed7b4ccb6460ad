"""Training on one GPU, measured: `python -m benchmarks.gpu` (also `make gpu`).

shapes.py   the models, and FLOP a token
peer.py     the same models in plain torch, one process a run
ours.py     the same as `mpctl launch` runs them
cases.py    which of them are compared, most important first
report.py   tables of docs/gpu.md
__main__.py the tests marked gpu, then the cases, within a budget of time
"""
