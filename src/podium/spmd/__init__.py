# SPDX-License-Identifier: Apache-2.0
"""A run in which every rank executes the same program: its folder, its ranks, and the program's interface."""
