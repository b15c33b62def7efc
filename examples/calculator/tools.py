# SPDX-License-Identifier: Apache-2.0
"""The one tool of the calculator task."""

from __future__ import annotations

import ast
import operator

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_LARGEST = 10**12


def calculate(expression: str) -> int:
    """Works out a sum, difference or product of whole numbers.

    Args:
        expression: for instance 17*23
    """
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: ast.expr) -> int:
    """Parses what the model wrote, and never runs it as code."""
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool) and abs(number) <= _LARGEST:
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return int(_OPERATORS[type(op)](_value(left), _value(right)))
        case _:
            raise ValueError("only whole numbers and + - * can be worked out")
