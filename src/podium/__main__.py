# SPDX-License-Identifier: Apache-2.0
"""`python -m podium`, which is also what torchrun starts."""

from podium.cli import main

main()
