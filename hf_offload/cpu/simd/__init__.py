"""SIMD building blocks of the CPU kernels: 16-lane vectors, register tiles, integer dot products, conversions."""
