"""Tests in a fork of a process that has imported what is slow to import."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import pytest

FORK = multiprocessing.get_context("fork")


class FirstFailure:
    """A plugin of pytest."""

    text = ""
    passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        if report.failed and not self.text:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else str(report.longrepr)
            self.text = f"{report.nodeid}: {(message.splitlines() or [''])[0]}"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.text:
            self.text = f"{report.nodeid} is not collected"


def first_failure(*arguments: str) -> str:
    """The first test that fails under these arguments of pytest, and why; empty if all pass."""
    failure = FirstFailure()
    quiet = ["-x", "-p", "no:terminal", "-p", "no:cacheprovider"]
    code = pytest.main([*quiet, *arguments], [failure])
    if code == 0 and failure.passed > 0:  # without their library, tests are skipped
        return ""
    return failure.text or f"pytest ends with {code}"


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
