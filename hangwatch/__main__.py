"""`python -m hangwatch`, where the console script is not on the path."""

from hangwatch.cli import main

main()
