"""All campaigns over what torch itself tests.

`python -m tests.campaigns [--samples N]` runs the first N samples of each op and module (0 for all), every optimizer,
and every op through planning and with narrow storages, and ends with exit code 1 if a law is broken.
"""

from __future__ import annotations

import argparse
import sys

from tests.campaigns import modules, ops, optimizers, planning, storages


def main() -> int:
    parser = argparse.ArgumentParser(description="All campaigns over what torch itself tests.")
    parser.add_argument("--samples", type=int, default=1, help="samples per op and module, 0 for all")
    samples = ["--samples", str(parser.parse_args().samples)]
    code = 0
    for name, run, arguments in (
        ("ops", ops.main, samples),
        ("modules", modules.main, samples),
        ("optimizers", optimizers.main, []),
        ("planning", planning.main, []),
        ("storages", storages.main, []),
    ):
        print(f"== {name}", flush=True)
        code |= run(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
