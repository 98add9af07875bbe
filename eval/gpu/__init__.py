"""What `eval/gpu_check.py` is made of: its parts, and what watches over them."""
