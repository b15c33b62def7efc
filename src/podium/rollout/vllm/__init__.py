# SPDX-License-Identifier: Apache-2.0
"""vLLM behind the rollout protocol: the engine runs inside this process, and the caller that iterates steps it."""
