# SPDX-License-Identifier: Apache-2.0
"""The controller's side of an on-policy run: phases, layout, ledger, evaluation and records."""
