"""`python -m inpage` is the `inpage` command."""

from inpage.cli import main

main()
