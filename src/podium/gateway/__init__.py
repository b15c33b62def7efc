# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible gateway in front of a rollout engine, which records every sampled token. Torch-free."""
