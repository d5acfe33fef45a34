"""make and gcc, pytest on two workers, pip: gone back to in the middle of their work."""

from __future__ import annotations

import importlib.util
import io
import re
import tarfile
from pathlib import Path

from deltabox import Process, Sandbox

from . import midway, workload


def test_make(sandbox: Sandbox) -> None:
    workload.c_project(sandbox, "/root/project", files=12, functions=12)
    midway.check(
        sandbox,
        ["make", "-j2", "--output-sync", "program"],
        "make -q program && ./program && ls && md5sum *.o program",
        cwd="/root/project",
        read=_in_any_order,
    )


def _in_any_order(sandbox: Sandbox, process: Process) -> midway.Outcome:
    code, out, error = midway.ended(sandbox, process)
    return code, "".join(sorted(out.splitlines(keepends=True))), error


def test_pytest_on_two_workers(sandbox: Sandbox) -> None:
    home = workload.HOME
    workload.library_and_pytest(sandbox, home)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in ("execnet", "xdist"):
            found = importlib.util.find_spec(name)
            assert found is not None and found.origin is not None
            tar.add(Path(found.origin).parent, name)
    sandbox.run(["tar", "x", "-C", f"{home}/site"], input=packed.getvalue(), check=True)
    run = (
        f"PYTHONPATH={home}/site exec python3 -m pytest -v -n 2 -p xdist.plugin -c tox.ini"
        " -p no:cacheprovider --color=no --junitxml=report.xml"
        " -k 'not netstring' --deselect tests/test_setutils.py"
        " tests/test_[i-l]*.py tests/test_s*.py"
    )
    midway.check(
        sandbox,
        ["sh", "-c", run],
        'grep -o \' failures="[0-9]*"\\| tests="[0-9]*"\' report.xml',
        cwd=f"{home}/boltons",
        read=_verdicts,
        expected=' failures="0"',
    )


def _verdicts(sandbox: Sandbox, process: Process) -> midway.Outcome:
    """Which tests passed, by whichever worker, and in whatever order."""
    code, out, error = midway.ended(sandbox, process)
    verdicts = re.findall(r"^\[gw[01]\] \[ *\d+%\] (.*?) *$", out, re.MULTILINE)
    assert len(verdicts) > 50, out
    return code, "\n".join(sorted(verdicts)), error


def test_pip(sandbox: Sandbox) -> None:
    home = workload.HOME
    workload.virtual_environment(sandbox, f"{home}/venv")
    made, wheeled = workload.source("made", "1.0", 20), workload.wheel("wheeled", "1.0", 200)
    workload.packages(sandbox, home, made, wheeled)
    install = (
        "exec venv/bin/pip install --no-index --no-build-isolation --disable-pip-version-check"
        " --no-color --progress-bar=off ./made-1.0.tar.gz ./wheeled-1.0-py3-none-any.whl"
    )
    midway.check(
        sandbox,
        ["sh", "-c", install],
        "venv/bin/python -c 'import made, wheeled; print(made.TOTAL, wheeled.TOTAL)'; "
        "venv/bin/pip check --disable-pip-version-check; ls /tmp; "
        "find venv -path '*/made*' -o -path '*/wheeled*' | grep -v pyc | sort | md5sum",
        cwd=home,
        read=_without_digests,
        expected="190 19900\n",
    )


def _without_digests(sandbox: Sandbox, process: Process) -> midway.Outcome:
    """A wheel that pip builds holds the times of its files, and its cache's name its digest."""
    code, out, error = midway.ended(sandbox, process)
    kept = [line for line in out.splitlines() if "sha256=" not in line and "Stored in" not in line]
    return code, "\n".join(kept), error
