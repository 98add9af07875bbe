"""Fluxion's compiled kernels: predictor, selector, and the scheduler's tasks."""
