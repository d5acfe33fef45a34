"""Thin, typed faces of the kernel interfaces the engine uses, one interface a module.

Nothing here decides anything: names and arguments are those of the man pages, errors are
`OSError` with the kernel's errno. This package is the only place where ctypes is used.
"""
