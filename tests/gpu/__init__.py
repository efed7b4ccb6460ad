"""What must hold on a GPU, by the same code on a CPU: each test runs on both.

On a CPU it always runs, so that it does not rot; on a CUDA device (ROCm goes by that name too) it
is marked `gpu` and skipped where there is none. `make gpu` runs the marked ones, and the kernels of
tests/train/kernels/triton compiled.
"""
