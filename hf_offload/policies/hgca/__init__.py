"""HGCA: a window on the device, and on the host the tokens of each KV head that received much attention."""
