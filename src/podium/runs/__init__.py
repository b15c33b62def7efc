# SPDX-License-Identifier: Apache-2.0
"""Parts that every run has: folder, records, schedule of checkpoints and evaluations, lineage, result."""
