"""Fluxion's kernels: the prediction, the choice of runs of blocks, tasks that the CPU shares with the device."""
