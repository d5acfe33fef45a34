"""Runs inside the sandbox: how many of the tests pass, as JSON, once for each line it reads.

    python3 -B judge.py LIBRARY

The tests are the repaired release's own of `numeric_range`, and test_issue.py. Each time they run
in a child, which imports the library as it is then and shares everything else, so that a judgement
does not begin with starting Python. The process lives through the whole search: at every state it
is the one that was there. A library that cannot be imported, or makes a test hang, passes none.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
import unittest
from pathlib import Path
from typing import Any

IMPORTED = ("asyncio", "concurrent.futures", "decimal", "doctest", "fractions", "unittest.mock")
SECONDS = 20  # for all tests


class Counting(unittest.TestResult):
    """Which tests have failed; a test with several subtests once."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: dict[str, str] = {}

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._note(test, err)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._note(test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self._note(test, err)

    def _note(self, test: unittest.TestCase, err: Any) -> None:
        said = traceback.format_exception_only(err[0], err[1])[-1].strip()
        self.failed.setdefault(test.id(), said.splitlines()[0])


def tests() -> unittest.TestSuite:
    suite = unittest.TestSuite()
    for module, name in (("test_more", "NumericRangeTests"), ("test_issue", "Slices")):
        cases = getattr(importlib.import_module(module), name)
        suite.addTest(unittest.defaultTestLoader.loadTestsFromTestCase(cases))
    return suite


def verdict() -> dict[str, object]:
    try:
        suite = tests()
    except Exception as error:
        return {"passed": 0, "total": 1, "failed": {"import": f"{type(error).__name__}: {error}"}}
    total = suite.countTestCases()
    result = Counting()
    suite.run(result)
    return {"passed": total - len(result.failed), "total": total, "failed": result.failed}


def judge() -> str:
    """A verdict, made in a child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)  # where verdicts go, and the library may print
        os.write(writing, json.dumps(verdict()).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    failed = {"all": f"the tests did not come to an end within {SECONDS} s"}
    return said or json.dumps({"passed": 0, "total": 1, "failed": failed})


if __name__ == "__main__":
    for module in IMPORTED:  # by the tests, besides the library
        importlib.import_module(module)
    sys.path[:0] = [str(Path(__file__).parent), sys.argv[1]]
    for _ in sys.stdin:
        print(judge(), flush=True)
