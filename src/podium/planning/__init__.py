# SPDX-License-Identifier: Apache-2.0
"""Predicts memory and time of a run from its recipe, the shape of its models and the device. Torch-free."""
