"""The search: depth first, a checkpoint at every node, a rollback out of every wrong one.

A node applies one proposal to its parent's state: it edits the file, lets the live Python
process take the edit over, and runs the library's own tests in the live shell. Fewer failures
than before: go deeper. Otherwise, or when all deeper ones failed: back to the parent, in time
and not by undoing. After each rollback the state (file, shell, Python's memory) is compared
with what it was when the parent was left.
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from deltabox import Checkpoint, Process, Sandbox, Shell
from deltabox.demo import library, live, rival
from deltabox.demo.proposals import FILE, Proposal, next_proposals
from deltabox.errors import DeltaBoxError

ROOT = "/demo"
FORKS = 8


@dataclass
class Node:
    """One state of the search."""

    path: tuple[Proposal, ...]
    failing: int
    checkpoint: Checkpoint
    state: str
    children: list[Node] = field(default_factory=list)
    found: bool = False
    back_ms: float | None = None  # the rollback out of this node to its parent
    rival_ms: float | None = None  # the same return by copy and re-execution

    @property
    def name(self) -> str:
        return self.path[-1].name if self.path else "boltons " + library.BROKEN

    @property
    def idea(self) -> str:
        return self.path[-1].idea if self.path else "imported, the set built, nothing changed"


class Search:
    """A sandbox with the library, a live shell and a live Python, and the walk through them."""

    def __init__(self, sandbox: Sandbox, console: Console, pristine: Path, scratch: Path) -> None:
        self._sandbox = sandbox
        self._console = console
        self._pristine = pristine
        self._scratch = scratch
        self._shell: Shell = sandbox.shell()
        self._shell.run(live.SHELL.format(root=ROOT))
        self._python: Process = sandbox.spawn(
            ["python3", "-B", "-u", "-c", live.DRIVER], cwd=f"{ROOT}/boltons"
        )
        self.suite = ""

    # --- the state ---

    def ask(self, program: str) -> str:
        return ask(self._python, program)

    def _state(self) -> str:
        code = self._sandbox.files.read_text(f"{ROOT}/boltons/{FILE}")
        shell = self._shell.run(live.SHELL_STATE).stdout
        return f"{live.digest(code)} {shell.strip()} {self.ask(live.STATE)}"

    def _judge(self, tests: str) -> tuple[int, str]:
        """How many tests fail, and pytest's last line."""
        output = self._shell.run(f"judge {tests}").stdout
        last = output.strip().rpartition("\n")[2]
        if "passed" not in last and "failed" not in last:
            raise DeltaBoxError(f"the tests did not run inside the sandbox:\n{output}")
        failed = re.search(r"(\d+) (failed|error)", last)
        return (int(failed[1]) if failed else 0), last

    # --- the walk ---

    def run(self) -> Node:
        self.ask(live.BUILD)
        failing, last = self._judge(library.JUDGE)
        root = Node((), failing, self._sandbox.checkpoint("root"), self._state())
        self._say(root, last)
        root.found = self._deeper(root)
        return root

    def _deeper(self, node: Node) -> bool:
        return any(self._try(node, proposal) for proposal in next_proposals(node.path))

    def _try(self, parent: Node, proposal: Proposal) -> bool:
        path = f"{ROOT}/boltons/{FILE}"
        edited = proposal.apply(self._sandbox.files.read_text(path))
        if edited is None:
            return False
        self._sandbox.files.write_text(path, edited)
        self.ask(live.TAKE_OVER)
        self._shell.run(f'tried="$tried {proposal.name}"')
        failing, last = self._judge(library.JUDGE)
        route = (*parent.path, proposal)
        checkpoint = self._sandbox.checkpoint("/".join(step.name for step in route))
        node = Node(route, failing, checkpoint, self._state())
        parent.children.append(node)
        self._say(node, last)
        if failing == 0:
            wrong, self.suite = self._judge("tests")
            node.found = wrong == 0
        elif failing < parent.failing:
            node.found = self._deeper(node)
        if not node.found:
            self._back(node, parent)
        return node.found

    def _back(self, node: Node, parent: Node) -> None:
        began = time.perf_counter()
        self._sandbox.rollback(parent.checkpoint)
        node.back_ms = (time.perf_counter() - began) * 1e3
        state = self._state()
        if state != parent.state:
            raise DeltaBoxError(f"the rollback gave {state!r} and not {parent.state!r}")
        node.rival_ms = rival.measure(self._pristine, self._scratch, parent.path) * 1e3

    def _say(self, node: Node, last: str) -> None:
        indent = "  " * len(node.path)
        verdict = last.strip("= ")
        self._console.print(f"{indent}[bold]{node.name}[/bold]: {node.idea}")
        self._console.print(f"{indent}  [dim]{verdict}[/dim]", highlight=False)

    # --- live copies ---

    def fork(self, checkpoint: Checkpoint) -> tuple[float, set[str]]:
        """Milliseconds until FORKS live copies have each answered from memory, and the answers."""
        began = time.perf_counter()
        children = self._sandbox.fork_many(FORKS, at=checkpoint)
        answers = {ask(child.counterpart(self._python), live.STATE) for child in children}
        took = (time.perf_counter() - began) * 1e3
        for child in children:
            child.close()
        return took, answers


def ask(python: Process, program: str) -> str:
    """Have the live Python execute a program text; what it printed."""
    python.stdin.write(live.line(program))
    answer = ""
    while True:
        printed = python.stdout.readline()
        if not printed:
            raise DeltaBoxError(f"the live Python process ended: {python.stderr.read_available()}")
        if printed.startswith(live.END):
            return answer.strip()
        answer += printed


def run(console: Console | None = None) -> Node:
    """The whole demo; prints to `console`."""
    console = console or Console()
    cache = library.default_cache()
    if not library.ready(cache):
        console.print("fetching the library and its tests, once ...")
        library.fetch(cache)
    with tempfile.TemporaryDirectory(prefix="deltabox-demo-") as directory:
        scratch = Path(directory)
        pristine = scratch / "pristine"
        library.unpack(library.archive(cache), pristine)
        with Sandbox.create() as sandbox:
            sandbox.files.mkdir(ROOT)
            sandbox.files.upload(str(library.archive(cache)), f"{ROOT}/all.tar")
            sandbox.run(f"tar --no-same-owner -xf {ROOT}/all.tar -C {ROOT}", check=True)
            console.rule(f"a tree search for a repair of {library.NAME} {library.BROKEN}")
            search = Search(sandbox, console, pristine, scratch)
            root = search.run()
            _report(console, sandbox, search, root)
    return root


def _report(console: Console, sandbox: Sandbox, search: Search, root: Node) -> None:
    console.print(_table(root))
    best = next((node for _, node in _walk(root) if node.found and not node.children), None)
    if best is None:
        raise DeltaBoxError("the search found no repair")
    suite = search.suite.strip("= ")
    console.print(f"[green]found[/green] {best.checkpoint.name}; the library's suite: {suite}")
    patch = sandbox.patch(root.checkpoint, under=f"{ROOT}/boltons")
    console.print(Syntax(patch.rstrip(), "diff", background_color="default"))
    took, answers = search.fork(best.checkpoint)
    same = "all the same" if len(answers) == 1 else f"{len(answers)} different ones"
    console.print(f"{FORKS} live copies of the winner, an answer from each ({same}): {took:.0f} ms")
    console.print(_summary(root))


def _walk(node: Node, guide: str = "", *, last: bool = True) -> Iterator[tuple[str, Node]]:
    """Every node with its branch of the drawn tree."""
    own = guide + ("└─ " if last else "├─ ") if node.path else ""
    yield own, node
    below = guide + ("   " if last else "│  ") if node.path else ""
    for child in node.children:
        yield from _walk(child, below, last=child is node.children[-1])


def _table(root: Node) -> Table:
    table = Table(title="the search tree", title_justify="left")
    table.add_column("node", no_wrap=True)
    table.add_column("tests\nfailing", justify="right")
    table.add_column("checkpoint\npause", justify="right")
    table.add_column("rollback", justify="right")
    table.add_column("copy and\nre-execution", justify="right")
    for guide, node in _walk(root):
        mark = "[green]✓[/green]" if node.found else "[red]✗[/red]"
        table.add_row(
            f"{guide}{node.name} {mark}",
            str(node.failing),
            _ms(node.checkpoint.stats.pause_ms),
            _ms(node.back_ms),
            _ms(node.rival_ms),
        )
    return table


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} ms"


def _summary(root: Node) -> str:
    nodes = [node for _, node in _walk(root)]
    back = [node.back_ms for node in nodes if node.back_ms is not None]
    again = [node.rival_ms for node in nodes if node.rival_ms is not None]
    pause = statistics.median(node.checkpoint.stats.pause_ms for node in nodes)
    rollback, copy = statistics.median(back), statistics.median(again)
    return (
        f"[bold]{len(nodes)} states, {len(back)} rollbacks[/bold], each verified (file, shell, "
        f"Python's memory). Medians: checkpoint pause {pause:.1f} ms, "
        f"rollback [bold green]{rollback:.1f} ms[/bold green], the same by copy and re-execution "
        f"{copy:.0f} ms ({copy / rollback:.0f} times as long)."
    )
