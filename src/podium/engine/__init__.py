# SPDX-License-Identifier: Apache-2.0
"""SPMD training: sharding, the train step, the optimizer, checkpoints. The same code under torchrun and inside a role."""
