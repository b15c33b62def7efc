# SPDX-License-Identifier: Apache-2.0
"""The tools of `adding`."""

import verifiers.v1 as vf


class AddToolset(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)


if __name__ == "__main__":
    AddToolset.run()
