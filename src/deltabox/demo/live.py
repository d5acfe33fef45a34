"""What runs in the live shell and in the live Python process, in the sandbox and at the rival.

The Python process is a loop that reads one line, a repr of a program text, executes it and
prints the answer and an end mark. Its state is what matters: an `IndexedSet` of 200,000 names
out of which 300 were removed, and a log of all that was asked of it.
"""

from __future__ import annotations

import hashlib

WORDS = 200_000
HOLES = 300
END = "\x04"

DRIVER = """
import sys
scope = {}
for line in sys.stdin:
    try:
        exec(eval(line), scope)
    except Exception as error:
        print(type(error).__name__, error)
    print("\\x04", flush=True)
"""

# The state: built once, by the broken code, and carried through the whole search.
BUILD = f"""
import importlib
from boltons import setutils
names = setutils.IndexedSet(f"name-{{i:06}}" for i in range({WORDS}))
for hole in range({HOLES}):
    names.discard(f"name-{{hole * 600 + 7:06}}")
asked = []
print("built", len(names), len(names.dead_indices))
"""

# Take the edited module over, in place, and ask the live set for a window behind the holes.
TAKE_OVER = """
importlib.reload(setutils)
names.__class__ = setutils.IndexedSet
window = list(names[150_000:150_003])
asked.append(window)
print(window[0], len(window), len(names.dead_indices), len(asked))
"""

# One line that says all about the state: holes, what was asked, the code that is loaded.
STATE = """
import hashlib
cls = setutils.IndexedSet
methods = (cls.iter_slice, cls.__getitem__, cls._get_real_index)
code = b"".join(method.__code__.co_code for method in methods)
print(len(names), len(names.dead_indices), asked, hashlib.sha256(code).hexdigest()[:12])
"""

# The shell's state: a directory, a variable, a function, a background job.
SHELL = """
cd {root}/boltons
tried=
judge() {{ PYTHONPATH={root}/site:. python3 -B -m pytest -q -p no:cacheprovider "$@" 2>&1; }}
sleep 100000 &
"""
SHELL_STATE = 'echo "$PWD:$tried:$(jobs -r | wc -l)"'


def line(program: str) -> str:
    """A program as the driver reads it."""
    return repr(program) + "\n"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
