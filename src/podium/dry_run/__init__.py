# SPDX-License-Identifier: Apache-2.0
"""Places a model and takes a training step as one rank of many would, without memory, devices or other ranks."""
