"""The keeper: the process that holds the sandboxes.

The engine cannot live in its user's process. Tracing belongs to the thread that began it, a death
signal fires when the *thread* that forked ends, and a subreaper inside of a library would steal its
user's `waitpid`. So there is one process per state directory, started by the first
`Sandbox.create()` as a terminal multiplexer starts its server, and the library is a thin client of
it over a unix socket.

    protocol    messages and how errors travel        server      connections, sessions, the end
    requests    what can be asked                     operations  checkpoint, rollback, fork, close
    commands    run, spawn, shell, their streams      box         one sandbox
    trees       sandboxes that share history          handles     programs held by their pipes
    streams     the pump and its buffers              background  work that nobody waits for
    budget      what may be used of the host          journal     what a killed keeper leaves
    accounts    users inside of a sandbox             retention   what a tree keeps on its own
"""
