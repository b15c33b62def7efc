# SPDX-License-Identifier: Apache-2.0
"""A package, so that its modules are found before `benchmarks/rollout.py`, in whatever order tests are collected."""
