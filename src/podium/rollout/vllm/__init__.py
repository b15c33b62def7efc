# SPDX-License-Identifier: Apache-2.0
"""vLLM behind the rollout protocol: the engine runs inside this process and is stepped by the caller that iterates."""
