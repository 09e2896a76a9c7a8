"""``python -m mpiagg`` is the command ``mpiagg``."""

from mpiagg.cli import main

main(prog_name="mpiagg")
