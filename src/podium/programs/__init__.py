# SPDX-License-Identifier: Apache-2.0
"""Start here: one method per file, each readable in one sitting."""
