"""CPU kernels; a module holds the compiled functions, the kernel, and the function that checks and makes its launch."""
