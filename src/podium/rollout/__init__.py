# SPDX-License-Identifier: Apache-2.0
"""Token generation behind one protocol: Podium's own engine on the learner's weights, and vLLM."""
