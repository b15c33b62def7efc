# SPDX-License-Identifier: Apache-2.0
"""Commands of the command line, and what their arguments share. Torch-free until a command computes."""
