"""Cases that may fail, crash or hang, run one after the other in a process that can be given up and started again.

A part of the check is a function `work(names, report)` that goes through its cases with `report.case`. What it reports
reaches the caller at once, so that nothing is lost with the process. A case that fails leaves the others alone: a new
process goes on behind it, since a device or its allocator may be of no use after it (torch 2.11 counts a capture that
has failed as one under way).
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

START_SECONDS = 90  # for imports, and whatever a part does before its first case
_FAILED = 70  # exit status of a child behind a case that failed

Work = Callable[[Sequence[str], "Report"], None]


class NotApplicable(Exception):
    """Raised inside a case that cannot be had here; the message says why."""


class TimeUp(Exception):
    """Raised inside a case that was given less time than it may take; the message says how far it got."""


class Report:
    """What a part tells of its cases.

    Args:
        send: takes the messages.
        deadline: on the monotonic clock; no case should begin later.
        alone: whether the process is the part's own: it prints where it hangs, and ends behind a failure.
    """

    def __init__(self, send: Callable[[tuple[Any, ...]], None], deadline: float, *, alone: bool = False) -> None:
        self._send, self.deadline, self._alone = send, deadline, alone

    @property
    def seconds_left(self) -> float:
        """Until the deadline."""
        return self.deadline - time.monotonic()

    @contextmanager
    def case(self, name: str, seconds: float) -> Iterator[None]:
        """One case: what it raises is told, and the next one may follow.

        Args:
            name: one of the names that the part was given.
            seconds: it may take.
        """
        self._send(("begin", name, seconds))
        if self._alone:
            faulthandler.dump_traceback_later(max(min(seconds, self.seconds_left) - 1, 0.5))
        status, note, fit = "done", "", True
        try:
            yield
        except NotApplicable as reason:
            status, note = "not applicable", str(reason)
        except TimeUp as reason:
            status, note = "cut off", str(reason)
        except torch.OutOfMemoryError as reason:  # of a capture, perhaps
            status, note, fit = "not applicable", str(reason).splitlines()[0], False
        except Exception:
            status, note, fit = "failed", traceback.format_exc(), False
        finally:
            if self._alone:
                faulthandler.cancel_dump_traceback_later()
        self._send(("end", status, note))
        if self._alone and not fit:
            os._exit(_FAILED)

    def row(self, **values: Any) -> None:
        """A row of results."""
        self._send(("row", values))


@dataclass
class Listener:
    """Takes the messages of a part.

    Args:
        names: the cases to come.
        on_row: called with each row.
        on_end: called with (name, status, note, seconds) of each case that has ended.
    """

    names: list[str]
    on_row: Callable[[dict[str, Any]], None]
    on_end: Callable[[str, str, str, float], None]
    running: str | None = None
    broken: str | None = None  # what ended a part outside of its cases
    limit: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def take(self, message: tuple[Any, ...]) -> None:
        """One message of a `Report`."""
        kind, *values = message
        if kind == "begin":
            self.running, seconds = values
            self.started = time.monotonic()
            self.limit = self.started + seconds
        elif kind == "row":
            self.on_row(values[0])
        elif kind == "end":
            self.end(*values)
        else:
            self.broken = values[0]

    def end(self, status: str, note: str) -> None:
        """The running case has ended."""
        assert self.running is not None
        name, self.running = self.running, None
        self.names.remove(name)
        self.on_end(name, status, note, time.monotonic() - self.started)


def supervise(work: Work, listener: Listener, seconds: float) -> None:
    """Run a part in processes of its own until it is through or time is up; what is left stays in `listener.names`.

    Args:
        work: the part, something that can be pickled.
        listener: gets what it tells.
        seconds: for all of it.
    """
    deadline = time.monotonic() + seconds
    while listener.names and time.monotonic() < deadline:
        before = list(listener.names)
        _run_child(work, listener, deadline)
        if listener.names == before:  # it did not get to a case: another process would not either
            return


def here(work: Work, listener: Listener, seconds: float) -> None:
    """Like `supervise`, in this process: crashes and hangs are its own."""
    work(tuple(listener.names), Report(listener.take, time.monotonic() + seconds))


def _run_child(work: Work, listener: Listener, deadline: float) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(work, tuple(listener.names), theirs, deadline))
    child.start()
    theirs.close()
    listener.limit = time.monotonic() + START_SECONDS
    why = None
    try:
        while True:
            if not ours.poll(max(min(listener.limit, deadline) - time.monotonic(), 0)):
                why = "time was up" if time.monotonic() >= deadline else "took too long"
                break
            listener.take(ours.recv())
            if listener.running is None:  # between two cases
                listener.limit = time.monotonic() + START_SECONDS
    except (EOFError, OSError):  # it has closed the pipe, or died while it wrote
        child.join(5)
    finally:
        _kill(child)
        ours.close()
    if listener.running is not None:
        status = "cut off" if why == "time was up" else "failed"
        listener.end(status, why or f"the process ended with status {child.exitcode}")


def _kill(child: Any) -> None:
    """End a child and what it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.join(10)


def _child(work: Work, names: Sequence[str], pipe: Connection, deadline: float) -> None:  # runs in the new process
    os.setpgid(0, 0)
    faulthandler.enable()
    try:
        work(names, Report(pipe.send, deadline, alone=True))
    except Exception:
        pipe.send(("broken", traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.close()
    os._exit(0)  # threads that hang would keep it
