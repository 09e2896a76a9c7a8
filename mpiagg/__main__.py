"""``python -m mpiagg`` is the command ``mpiagg``."""

from mpiagg.cli import main

if __name__ == "__main__":
    main(prog_name="mpiagg")
