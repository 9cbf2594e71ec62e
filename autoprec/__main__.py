"""`python -m autoprec`, as the command `autoprec`."""

from __future__ import annotations

from autoprec.cli.main import main

if __name__ == "__main__":
    main()
