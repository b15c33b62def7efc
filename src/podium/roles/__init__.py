# SPDX-License-Identifier: Apache-2.0
"""Roles of workers under a controller (learner, generator, scorer, grader, ...), and the controller's handles."""
