"""The demo: repair a real library by tree search, going back in time from every wrong branch.

The library is boltons 26.0.0, whose `IndexedSet` gives wrong slices once items were removed and
wraps negative indices twice (upstream pull request 423, repaired in 26.1.0). Several repairs
look right; finding the one that is takes a search. Each node of it edits a file, and works in
*one* live shell and *one* live Python process, which holds a large set built up by the broken
code and takes each edit over by a reload. A wrong branch damages all of it: the file, the
shell's variables, the set in memory. A rollback makes it undone.

- `library.py`: what is downloaded, pinned by hash, and laid out inside the sandbox;
- `proposals.py`: the repairs to try, as data;
- `search.py`: the search in a sandbox;
- `rival.py`: the same return to a state by copying files and running everything again.
"""

from deltabox.demo.library import fetch
from deltabox.demo.search import run

__all__ = ["fetch", "run"]
