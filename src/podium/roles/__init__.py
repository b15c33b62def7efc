# SPDX-License-Identifier: Apache-2.0
"""What a worker can be under a controller (learner, generator, scorer, grader, ...), and the controller's handles."""
