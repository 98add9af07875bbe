"""Turns of two processes that run the same script, and the start of such a process (see `versus.py`).

python eval/turns.py SETTINGS SCRIPT ARGUMENTS
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import socket
import sys

SOCKET = "EVAL_TURNS"
"""The variable that names the socket to the one who gives turns."""


def turn() -> None:
    """Wait until it is this process's turn; at once where nobody gives turns.

    A script calls it before each round, so that what is prepared once, such as a long prompt, is not prepared again.
    """
    if (number := os.environ.get(SOCKET)) is not None:
        with socket.socket(fileno=os.dup(int(number))) as giver:
            giver.sendall(b".")
            if not giver.recv(1):
                sys.exit("nobody gives turns any more")


def run(settings: str, script: str, *arguments: str) -> None:
    """Run a script as if it were started by itself, with the package that PYTHONPATH names.

    Args:
        settings: JSON. `assets`: name and file of the module of texts and demo model, which is the same for everybody.
            `names`: public names, which an older package may have in its modules alone.
    """
    import hf_offload

    given = json.loads(settings)
    name, file = given["assets"]
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = assets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(assets)
    homes = [module for name, module in sys.modules.items() if name.startswith("hf_offload.")]
    for name in given["names"]:
        for home in homes:
            if not hasattr(hf_offload, name) and hasattr(home, name):
                setattr(hf_offload, name, getattr(home, name))
        if hasattr(assets, name):
            setattr(hf_offload, name, getattr(assets, name))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    run(*sys.argv[1:])
