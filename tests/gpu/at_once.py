"""A pytest plugin: `-p tests.gpu.at_once --log FILE` tells each failure when it happens.

A run on a device may be stopped by its time limit, before pytest's own report of failures. The file
has a line for every test that was begun, so that the last one says where a run was stopped.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--log", type=Path, help="what happens, line by line, goes to this file too")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.log is not None and not config.option.collectonly:
        config.option.log.parent.mkdir(parents=True, exist_ok=True)
        config.option.log.write_text("")
        config.pluginmanager.register(AtOnce(config))


class AtOnce:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and not report.failed:
            self._write(f"    {report.outcome} in {report.duration:.1f} s")
        self._tell(report, f"    FAILED in {report.when} after {report.duration:.1f} s")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._tell(report, f"{report.nodeid}\n    FAILED to be collected")

    def _tell(self, report: pytest.TestReport | pytest.CollectReport, line: str) -> None:
        if report.failed:
            self._write(f"{line}\n{report.longreprtext}")
            terminal = self._config.pluginmanager.getplugin("terminalreporter")
            terminal.write_line(f"\nFAILED {report.nodeid}\n{report.longreprtext}")

    def _write(self, line: str) -> None:
        with self._config.option.log.open("a") as file:
            print(line, file=file)
