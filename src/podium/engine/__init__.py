# SPDX-License-Identifier: Apache-2.0
"""SPMD training: sharding, train step, optimizer, checkpoints. The same code under torchrun and inside a role."""
