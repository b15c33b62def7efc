# SPDX-License-Identifier: Apache-2.0
"""A sandbox for programs that a model has written: isolated, limited, and warm. See docs/sandbox.md."""

from podium.environments.sandbox.limits import SandboxLimits, SandboxResult
from podium.environments.sandbox.pool import Sandbox, recipe_sandbox
from podium.environments.sandbox.tests_apart import TestResult

__all__ = ["Sandbox", "SandboxLimits", "SandboxResult", "TestResult", "recipe_sandbox"]
