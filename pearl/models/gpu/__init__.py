"""The GPU back end of our own forward: tables of rows, Triton kernels, their tuning and their recordings."""
