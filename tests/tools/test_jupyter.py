"""A Jupyter kernel (ipykernel) over ZeroMQ, and the client that drives it, both inside.

A connection of ZeroMQ is several: TCP sockets, eventfds between the threads of each side, and
state in memory on both sides that must agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from deltabox import Process, Sandbox

from .packages import ENVIRONMENT, PYTHON, install
from .returns import returns

DRIVER = """
import json, os, sys
from jupyter_client.manager import start_new_kernel

manager, client = start_new_kernel(kernel_name="python3")
print(json.dumps("ready"), flush=True)
running = []  # cells that were sent and not waited for

def finish(cell):
    out = []
    while True:
        message = client.get_iopub_msg(timeout=30)
        if message["parent_header"].get("msg_id") != cell:
            continue
        content = message["content"]
        if message["msg_type"] == "stream":
            out.append(content["text"])
        elif message["msg_type"] == "execute_result":
            out.append(content["data"]["text/plain"])
        elif message["msg_type"] == "error":
            out.append(content["ename"])
        elif message["msg_type"] == "status" and content["execution_state"] == "idle":
            break
    while client.get_shell_msg(timeout=30)["parent_header"]["msg_id"] != cell:
        pass
    return "".join(out)

def first_output(cell):
    while True:
        message = client.get_iopub_msg(timeout=30)
        if message["parent_header"].get("msg_id") == cell and message["msg_type"] == "stream":
            return message["content"]["text"]

for line in sys.stdin:
    kind, text = json.loads(line)
    if kind == "run":
        answer = finish(client.execute(text))
    elif kind == "begin":
        running.append(client.execute(text))
        answer = first_output(running[-1])
    elif kind == "finish":
        answer = finish(running.pop())
    elif kind == "interrupt":
        manager.interrupt_kernel()
        answer = finish(running.pop())
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[tuple[Sandbox, Process]]:
    """A sandbox with a kernel that has run nothing yet."""
    with Sandbox.create() as sandbox:
        install(sandbox, "ipykernel")
        sandbox.run([PYTHON, "-m", "ipykernel", "install"], env=ENVIRONMENT, check=True)
        driver = sandbox.spawn([PYTHON, "-c", DRIVER], env=ENVIRONMENT)
        assert driver.stdout.readline(timeout=60) == '"ready"\n', driver.stderr.read(timeout=20)
        yield sandbox, driver


def tell(driver: Process, kind: str, text: str = "") -> str:
    driver.stdin.write(json.dumps([kind, text]) + "\n")
    line = driver.stdout.readline(timeout=60)
    assert line, driver.stderr.read_available()
    answer: str = json.loads(line)
    return answer


def test_cells(notebook: tuple[Sandbox, Process]) -> None:
    origin, parent = notebook
    with origin.fork() as sandbox:
        driver = sandbox.counterpart(parent)
        assert tell(driver, "run", "import random; values = [1, 2]; values") == "[1, 2]"
        assert (
            tell(driver, "run", "def grow(): values.append(len(values) + 1); return values") == ""
        )

        def verify(box: Sandbox) -> None:
            kernel = box.counterpart(driver)
            assert tell(kernel, "run", "grow()") == "[1, 2, 3]"
            assert tell(kernel, "run", "In[-2], len(In)") == "('grow()', 5)"
            assert tell(kernel, "run", "1 / 0") == "ZeroDivisionError"
            assert tell(kernel, "run", "del values; print('gone')") == "gone\n"
            assert tell(kernel, "run", "grow()") == "NameError"

        returns(sandbox, verify)


LOOP = """
import time
for n in range(400):
    marks.append(n)
    if n == 3: print('begun', flush=True)
    sum(range(20_000))
    while n == 200 and not os.path.exists('/tmp/on'): time.sleep(0.001)
done = 1
print('end', len(marks), marks == list(range(400)))
"""


def test_in_the_middle_of_a_cell(notebook: tuple[Sandbox, Process]) -> None:
    origin, parent = notebook
    with origin.fork() as sandbox:
        driver = sandbox.counterpart(parent)
        assert tell(driver, "run", "import os; done = 0; marks = []") == ""
        assert tell(driver, "begin", LOOP) == "begun\n"

        def verify(box: Sandbox) -> None:
            box.files.write_text("/tmp/on", "")
            kernel = box.counterpart(driver)
            assert tell(kernel, "finish") == "end 400 True\n"
            assert tell(kernel, "run", "done, len(marks)") == "(1, 400)"
            assert tell(kernel, "run", "marks.append(0); done = 2") == ""

        returns(sandbox, verify)
        # a cell that comes back can be interrupted, and the kernel goes on
        assert tell(driver, "begin", "print('on', flush=True)\nwhile True: pass") == "on\n"
        checkpoint = sandbox.checkpoint()
        for _ in range(2):
            assert tell(driver, "interrupt") == "KeyboardInterrupt"
            assert tell(driver, "run", "done") == "2"
            sandbox.rollback(checkpoint)
