"""The registered attention function: prompts, decode steps, query prediction, drafts and CUDA graphs."""
