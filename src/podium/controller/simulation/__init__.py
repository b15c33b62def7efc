# SPDX-License-Identifier: Apache-2.0
"""Predicts how long the steps of a schedule take: the real scheduler and its audit, over a model of the costs."""
