"""Policies: which blocks a decode step attends, which are resident, which are copied. `base.py` is their contract."""
