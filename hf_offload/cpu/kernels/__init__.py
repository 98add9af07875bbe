"""Kernels of the CPU: compiled functions, the kernel, and the function that checks arguments and makes its launch."""
