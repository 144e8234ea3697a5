"""`python -m headrace` is the command `headrace`."""

from headrace.cli import main

raise SystemExit(main())
