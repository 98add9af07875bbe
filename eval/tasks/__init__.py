"""What `longbench.py`, `ruler.py` and `leval.py` share: samples, prompts, rows, answers, records, scores, reports."""
