# SPDX-License-Identifier: Apache-2.0
"""What runs inside of a sandbox, before and beside the program. Only the standard library is there."""
