"""Makes calls in another process: one that hangs or dies is an exception here.

May import torch. This process neither asks the driver for anything nor waits for ever: the driver
may keep a killed process for as long as its kernel runs.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from subprocess import DEVNULL, Popen, TimeoutExpired
from time import monotonic
from typing import Any

import torch

STARTS, START = 3, 300.0  # how often a process is started, and seconds that it may take
_CHILD = "from bapo_kernels.tools.processes import *; serve(Connection(int(sys.argv[1])))"


class CallError(Exception):
    """Raised with what failed, the ``"call"`` or also its ``"process"``, and how."""


class Worker:
    """Makes calls in one process, and in a new one if that is lost; each may take ``limit`` s."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._child: Popen[bytes] | None = None

    def results(self, call: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        """Yields the values of a call that can be pickled.

        Raises:
            CallError: it raised, did not end in time, or ended its process.
            ChildProcessError: no process starts.
        """
        if self._child is None:
            self._start()
        with suppress(OSError):  # one that has died since its last call does not answer
            self._pipe.send_bytes(pickle.dumps(call))
        yield from self._answers(self._limit)

    def close(self) -> str:
        """Kills the process. Says how it ended, also if that was before."""
        child, self._child = self._child, None
        if child is None:
            return "never started"
        child.kill()  # before it sees that nobody listens any more
        self._pipe.close()
        with suppress(TimeoutExpired):
            child.wait(10)
        names = {-number: number.name for number in signal.Signals}
        return names.get(child.returncode, f"exit status {child.returncode}")

    def _start(self) -> None:
        variables = {"PYTHONPATH": os.pathsep.join(sys.path), "BAPO_SELF_CHECK": "0"}
        for _ in range(STARTS):
            self._pipe, theirs = Pipe()
            command = [sys.executable, "-Xfaulthandler", "-c", _CHILD, str(theirs.fileno())]
            streams: Any = dict(stdin=DEVNULL, stdout=2, pass_fds=[theirs.fileno()])
            self._child = Popen(command, env=os.environ | variables, **streams)
            theirs.close()
            try:
                next(self._answers(START), None)
                return
            except CallError as error:
                _, how = error.args
        raise ChildProcessError(f"{STARTS} processes in succession failed at their start: {how}")

    def _answers(self, limit: float) -> Iterator[Any]:
        end = monotonic() + limit
        try:
            while self._pipe.poll(max(end - monotonic(), 0.0)):
                what, value = self._pipe.recv()
                if what == "end":
                    return
                if what != "value":
                    break
                yield value
            else:
                what, value = "process", f"did not end within {limit:g} s"
        except (EOFError, OSError):
            what, value = "process", f"the process died: {self.close()}"
        if what == "process":
            self.close()
        raise CallError(what, value)


def serve(pipe: Connection) -> None:
    """Makes the calls that arrive; runs in the other process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process gets it as well
    pipe.send(("end", None))
    while True:
        call = pipe.recv_bytes()
        try:
            for value in pickle.loads(call)():
                pipe.send(("value", value))
            pipe.send(("end", None))
        except Exception as error:
            pipe.send((_failed(), f"{type(error).__name__}: {error}"))


def _failed() -> str:
    """Says what an exception has ended: after some errors of CUDA all later calls would fail."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return "process"
    return "call"
