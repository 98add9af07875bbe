"""The registered attention function, and the prompts and decode steps behind it."""
