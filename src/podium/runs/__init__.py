# SPDX-License-Identifier: Apache-2.0
"""What every run has, however its steps are computed: folder, records, when to save and evaluate, lineage, result."""
