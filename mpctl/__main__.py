"""`python -m mpctl`."""

from mpctl.cli.entry import main

main()
