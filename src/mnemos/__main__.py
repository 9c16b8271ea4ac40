"""`python -m mnemos` is the command `mnemos`."""

from mnemos.cli import main

raise SystemExit(main())
