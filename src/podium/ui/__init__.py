# SPDX-License-Identifier: Apache-2.0
"""The page of `podium ui` and `podium report`: reads run folders and answers a browser. Torch-free; changes no run."""
