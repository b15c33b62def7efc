# SPDX-License-Identifier: Apache-2.0
"""Episodes and what makes them good: environments and tools, verifiers, reward functions and grading. Torch-free."""
