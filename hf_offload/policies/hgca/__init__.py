"""HGCA: dense attention to a window on the device, per-head sparse attention to retained tokens on the CPU."""
