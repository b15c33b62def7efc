# SPDX-License-Identifier: Apache-2.0
"""What several test rooms share: tiny models and data, an engine on one rank, rank functions, processes."""
