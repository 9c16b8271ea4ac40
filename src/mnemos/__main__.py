"""`python -m mnemos` is the command `mnemos`."""

from mnemos.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()  # before the other imports, which take time

from mnemos.cli import main

raise SystemExit(main())
