"""File state: what a checkpoint, a rollback and a fork do to the files of a sandbox.

One btrfs image per sandbox tree (`image`), subvolumes in it as upper layers (`layers`), an
overlay over the read-only base as the root (`root`), what changed between two states (`diff`),
and file access from outside (`inside`). Nothing here knows about processes.
"""
