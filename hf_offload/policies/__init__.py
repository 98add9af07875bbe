"""Methods: what a decode step attends, what is resident, what moves. `base.py` is their contract."""
