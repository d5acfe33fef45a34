"""`python -m deltabox`: the same as the console script."""

from deltabox.cli import main

main()
