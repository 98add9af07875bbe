"""Decode steps as CUDA graphs."""
