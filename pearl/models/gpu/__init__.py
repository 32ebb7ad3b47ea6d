"""The GPU back end of our own forward: Triton kernels, tuned and recorded as CUDA graphs."""
