# SPDX-License-Identifier: Apache-2.0
"""Sources, chat templates and loss masks, mixing, packing and splitting. Torch-free."""
