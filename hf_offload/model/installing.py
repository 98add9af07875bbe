"""`installing`: one thread at a time puts hooks, methods or classes into models, or takes them out."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager

_lock = threading.RLock()


def installing() -> AbstractContextManager[bool]:
    """Return the lock that is held while a thread looks for what is installed in a model and installs what is not.

    It is one for all models.
    """
    return _lock


def _renew() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held the old one


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
