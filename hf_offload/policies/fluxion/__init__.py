"""Fluxion: per-head budgets and granularities, predicted in each step, over tokens in host memory."""
