"""What `longbench.py` and `ruler.py` share: samples, prompts, rows, answers, records, scores, reports."""
