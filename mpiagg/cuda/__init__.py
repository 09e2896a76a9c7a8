"""NVIDIA's devices, by CuPy: memory, streams, kernels, NCCL, and which device a rank takes."""
