# SPDX-License-Identifier: Apache-2.0
"""The command `podium`, also as `python -m podium`, which is what torchrun starts."""

import sys

from podium import cli
from podium.supervising import is_supervised, supervise


def main() -> None:
    """Runs the command line, with a supervisor if it may need one."""
    arguments = sys.argv[1:]
    cli.main(supervise(arguments) if is_supervised(arguments) else arguments)


if __name__ == "__main__":
    main()
