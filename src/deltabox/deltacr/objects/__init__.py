"""One file for each kind of kernel object: how it is captured, and the records that rebuild it."""
