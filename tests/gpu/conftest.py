"""Failures are printed as they happen: the machine of a GPU may be gone before pytest's summary."""

import pytest


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n==== {report.nodeid} failed in {report.when}\n{report.longreprtext}", flush=True)
