"""Tests in a fork of a process that has imported what is slow to import."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

FORK = multiprocessing.get_context("fork")


def in_fork(work: Callable[[], str], seconds: float) -> str:
    """What ``work`` returns, or what becomes of its process."""
    receives, sends = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: sends.send(work()))
    process.start()
    sends.close()
    try:
        return receives.recv() if receives.poll(seconds) else "does not end"
    except EOFError:
        return "takes the process with it"
    finally:
        process.kill()
        process.join()
