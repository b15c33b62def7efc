# SPDX-License-Identifier: Apache-2.0
"""What the controller of an on-policy run does between two awaits: phases, layout, ledger, evaluation, records."""
