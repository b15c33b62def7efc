# SPDX-License-Identifier: Apache-2.0
"""Podium's own rollout engine: continuous batching on the same modules that the learner trains."""
