"""Vectors of 16 lanes, register tiles, dot products and conversions for kernels."""
