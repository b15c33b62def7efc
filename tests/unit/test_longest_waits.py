# SPDX-License-Identifier: Apache-2.0
"""Nothing waits longer than a person: every duration in the code above ten minutes is listed with who speaks
meanwhile."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import podium

SOURCE = Path(podium.__file__).parent
MOST_S = 600.0
SPEAKS = {
    ("roles/handles.py", "PHASE_S"): "workers that do not advance are ended, and controller/watching.py speaks",
    ("roles/scorer.py", "_SAVING_S"): "engine/checkpoint.py warns every minute",
    ("recipe/schema.py", "timeout_s"): "of checkpoint: engine/checkpoint.py warns every minute",
    ("environments/rewards.py", "_JUDGING_S"): "each judgement has a deadline, and controller/watching.py speaks",
    ("spmd/on_ray.py", "_RUN_S"): "a whole run, whose console is followed",
    ("cluster/cluster.py", "_FOREVER_S"): "a debugger: only where deadlines are switched off",
    ("controller/simulation/controlled.py", "_FOREVER_S"): "on a virtual clock",
    ("controller/lent_devices.py", "_LAST_LOOK_S"): "no wait: for so long the scheduler is told how long a batch takes",
}  # fmt: skip


def durations(code: str) -> Iterator[tuple[str, float]]:
    """Names that are seconds by their suffix, with the number that they are set to, also as a default."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                pairs = [(name, value)]
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                pairs = [
                    (each.id, value) for each, value in zip(names, values, strict=True) if isinstance(each, ast.Name)
                ]
            case ast.arguments():
                positional = [*node.posonlyargs, *node.args]
                defaults = zip(positional[len(positional) - len(node.defaults) :], node.defaults, strict=True)
                named = zip(node.kwonlyargs, node.kw_defaults, strict=True)
                pairs = [(each.arg, value) for each, value in [*defaults, *named] if value is not None]
            case _:
                continue
        for name, value in pairs:
            seconds = _number(value)
            if name.lower().endswith("_s") and seconds is not None:
                yield name, seconds


def _number(value: ast.expr) -> float | None:
    """The number that an expression is, or the default of a recipe's field."""
    match value:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            factors = _number(left), _number(right)
            return None if factors[0] is None or factors[1] is None else factors[0] * factors[1]
        case ast.Call(func=ast.Name(id="Field"), args=[first, *_]):
            return _number(first)
        case _:
            return None


def test_every_wait_above_ten_minutes_is_listed_with_who_speaks_meanwhile() -> None:
    found = {
        (path.relative_to(SOURCE).as_posix(), name)
        for path in sorted(SOURCE.rglob("*.py"))
        for name, seconds in durations(path.read_text(encoding="utf-8"))
        if seconds > MOST_S
    }
    assert found == set(SPEAKS)


def test_constants_fields_and_defaults_are_found() -> None:
    code = """
DAY_S = 24 * 3600.0
FIRST_S, SECOND_S = 1.0, 900.0
class Section:
    timeout_s: Real = Field(1800.0, gt=0)
def wait(deadline_s: float = 700, *, name: str, left_s: float = 5.0): ...
"""
    assert dict(durations(code)) == {
        "DAY_S": 86400.0, "FIRST_S": 1.0, "SECOND_S": 900.0, "timeout_s": 1800.0, "deadline_s": 700.0, "left_s": 5.0,
    }  # fmt: skip
