"""Kernels written in Triton (Tillet et al., MAPL 2019, doi 10.1145/3315508.3329973), for CUDA.

Each is an operation of torch in the namespace `mpctl`, made of three parts:

- a schema and what tensors it returns (`operation.py`), which needs no triton: fake tensors, a
  rehearsal and torch.compile see exactly one operation;
- what launches the kernel, which imports `jit/` when it is first called;
- the kernel in Triton's language, in `jit/`. With TRITON_INTERPRET=1 in the environment when it is
  imported, it runs on CPU tensors; tests/kernels/triton holds it to the reference that way.

`TritonKernels` (backend.py) is the `KernelBackend` that calls them.
"""
