# SPDX-License-Identifier: Apache-2.0
"""What travels between the tests and the tested program: copies of plain values, and nothing that runs code."""

from __future__ import annotations

import datetime
import json
import math
import socket
import threading
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from podium.environments.sandbox.inside import values
from podium.environments.sandbox.inside.serving import Server
from podium.environments.sandbox.inside.testing import Program, ProgramLostError, _failure


def travelled(value: Any) -> Any:
    """A value on the other side."""
    packed = json.loads(json.dumps(values.pack(value, lambda each: {"number": 0, "type": type(each).__name__})))
    return values.unpack(packed, lambda content: ("object", content["type"]))


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -7, 2**200, -(2**63), pytest.param(10**5000, id="huge"), 1.5, math.inf, "text \ud800",
        b"\x00\xff", [1, [2, (3,)]], {"a": {1: 2}, (1, 2): frozenset({3})}, {1, 2}, complex(1, -2), Decimal("1.10"),
        Fraction(1, 3), range(3), datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2, 3),
        datetime.timedelta(1, 2, 3),
    ],
)  # fmt: skip
def test_plain_values_arrive_as_they_are(value: Any) -> None:
    assert travelled(value) == value
    assert type(travelled(value)) is type(value)


def test_a_subclass_arrives_as_its_base_without_its_own_comparison() -> None:
    class Anything(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    arrived = travelled(Anything(3))
    assert type(arrived) is int
    assert arrived != 4
    assert travelled(OrderedDict(a=1)) == {"a": 1}
    assert travelled(Counter("aa")) == {"a": 2}
    assert travelled(namedtuple("P", "x y")(1, 2)) == (1, 2)


def test_other_objects_arrive_as_numbers() -> None:
    assert travelled([object()]) == [("object", "object")]


@pytest.mark.parametrize("packed", [{}, ["list"], ["nothing", 1], [1, 2], ["list", 3], ["int", 4]])
def test_what_is_no_value_is_refused(packed: Any) -> None:
    with pytest.raises(ValueError, match=r"kind|stands for no value"):
        values.unpack(packed, lambda content: content)


def failures(program: str, *tests: str, setup: str = "") -> list[str | None]:
    """Runs tests on one side of a pair of sockets, and the program on the other."""
    mine, theirs = socket.socketpair()
    with mine:
        server = threading.Thread(target=_served, args=(theirs, program), daemon=True)
        server.start()
        tested = Program(mine)
        why = tested.load()
        found = [why if why is not None else _failure(test, setup, tested) for test in tests]
        mine.shutdown(socket.SHUT_RDWR)
    server.join(10.0)
    return found


def _served(channel: socket.socket, program: str) -> None:
    with channel:
        Server(channel).serve(program)


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in ("__main__", "solution"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))  # type: ignore[arg-type]


CLASSES = """
class Stack:
    def __init__(self, items=()):
        self.items = list(items)
    def push(self, item):
        self.items.append(item)
        return self
    def __len__(self):
        return len(self.items)
    def __eq__(self, other):
        return True
    def __iter__(self):
        return iter(self.items)
    def __add__(self, other):
        return Stack([*self.items, *other.items])

class TooMuch(ValueError):
    pass

def check_size(n):
    if n > 3:
        raise TooMuch(f"{n} is too much")
    return n

def reverse(items):
    items.reverse()

def count():
    n = 0
    while True:
        yield n
        n += 1
"""


@pytest.mark.parametrize(
    "test",
    [
        "assert len(Stack([1]).push(2)) == 2",
        "s = Stack([1, 2])\nassert s.items == [1, 2]\nassert list(s) == [1, 2]",
        "assert isinstance(Stack(), Stack)",
        "import itertools\nassert list(itertools.islice(count(), 3)) == [0, 1, 2]",
        "x = [1, 2, 3]\nassert reverse(x) is None\nassert x == [3, 2, 1]",
        "from solution import check_size\nassert check_size(n=3) == 3",
        "try:\n    check_size(4)\n    assert False\nexcept TooMuch as error:\n    assert str(error) == '4 is too much'",
        "try:\n    check_size(4)\nexcept ValueError:\n    pass\nelse:\n    assert False",
        "def test_one():\n    assert check_size(1) == 1",
        "assert Stack([1]) + Stack([2]) == Stack([1, 2])\nassert (Stack([1]) + Stack([2])).items == [1, 2]",
        "assert 2 in Stack([1, 2])\nassert 3 not in Stack([1, 2])",
        "s = Stack([1])\nassert s in Stack([s])",
        "def check(candidate):\n    assert abs(candidate(1.5) - 1.5) < 1e-6\ncheck(check_size)",
        "import pytest\nassert check_size(0.1 + 0.2) == pytest.approx(0.3)",
    ],
)
def test_tests_use_functions_classes_generators_and_exceptions_of_the_program(test: str) -> None:
    assert failures(CLASSES, test) == [None]


@pytest.mark.parametrize(
    "test",
    [
        "assert Stack() == 3",  # its own __eq__ says yes to everything
        "assert 3 == Stack()",
        "assert check_size(4) == 4",
        "def test_one():\n    assert check_size(1) == 2",
        "assert missing() == 1",
        "exit(0)",
    ],
)
def test_wrong_programs_fail(test: str) -> None:
    assert failures(CLASSES, test)[0] is not None


CHEATS: dict[str, str] = {
    "equal to everything": "class A:\n    def __eq__(self, other): return True\ndef f(x): return A()",
    "an int that is equal to everything": (
        "class A(int):\n    def __eq__(self, other): return True\ndef f(x): return A()"
    ),
    "replaces a builtin": "def abs(x): return 0\ndef all(x): return True\ndef f(x): return 0",
    "replaces a module": "class math:\n    isclose = staticmethod(lambda *a: True)\ndef f(x): return 0",
    "ends itself": "import os\ndef f(x): raise SystemExit(0)",
    "ends itself at once": "raise SystemExit(0)",
    "looks for the expected value": (
        "import gc, sys\ndef f(x):\n    frame = sys._getframe()\n    found = []\n    while frame:\n"
        "        found += [v for v in frame.f_locals.values() if v == 'forty-' + 'two']\n        frame = frame.f_back\n"
        "    return found[0] if found else None"
    ),
}


# An object whose every operator and method says what a test wants to hear, and remembers what it was asked with.
_AGREEING = """
asked = []
def agrees(*args, **named):
    asked.extend(args[1:])
    return True
def nothing(*args):
    asked.extend(args[1:])
    return 0.0
class A:
    def __getattr__(self, name): return agrees
    def told(self): return [each for each in asked if not isinstance(each, A)]
for name in "eq ne lt le gt ge contains".split():
    setattr(A, f"__{name}__", agrees)
for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod".split():
    setattr(A, f"__{name}__", nothing)
    setattr(A, f"__r{name}__", nothing)
A.__hash__ = lambda self: 42
A.__abs__ = lambda self: self
def f(x): return A()
"""
# Tests that an honest function passes with plain values.
_COMPARISONS = {
    "difference": "assert abs(f(1) - 42) < 1e-6",
    "difference of the other side": "assert abs(42 - f(1)) < 1e-6",
    "contains": "assert 42 in f(1)",
    "is contained": "assert f(1) in [42]",
    "is contained in a set": "assert f(1) in {42}",
    "is a key": "assert {42: True}[f(1)]",
    "sum": "assert f(1) + 42 == 84",
    "joined": "assert [42] + f(1) == [42, 42]",
    "joined text": "assert '42' + f(1) == '4242'",
    "formatted": "assert '%s' % f(1) == '42'",
    "quotient": "assert f(1) / 42 == 1",
    "remainder": "assert f(1) % 42 == 0",
    "bits": "assert f(1) ^ 42 == 0",
    "order": "assert 41 < f(1) < 43",
    "greatest": "assert max(f(1), 41) == 42",
    "in place": "x = f(1)\nx -= 42\nassert not x",
    "divmod": "assert divmod(f(1), 42) == (1, 0)",
    "power": "assert pow(f(1), 2) == 42 ** 2",
    "begins": "assert f(1).startswith('42')",
    "ends": "assert f(1).endswith('42')",
    "subset": "assert f(1).issubset({42})",
    "approximately": "import pytest\nassert f(1) == pytest.approx(42)",
    "approximately of the other side": "import pytest\nassert pytest.approx(42) == f(1)",
    "unittest": "import unittest\nunittest.TestCase().assertAlmostEqual(f(1), 42)",
    "unittest in": "import unittest\nunittest.TestCase().assertIn(42, f(1))",
    "statistics": "import statistics\nassert statistics.mean([f(1), 42]) == 42",
    "array": "import numpy\nassert numpy.allclose(f(1), [42])",
    "difference of an array": "import numpy\nassert abs(numpy.float64(42) - f(1)) < 1e-6",
}


@pytest.mark.parametrize("comparison", _COMPARISONS)
def test_an_object_that_agrees_with_everything_passes_no_comparison_and_is_not_told_the_value(comparison: str) -> None:
    failure, told = failures(_AGREEING, _COMPARISONS[comparison], "assert f(1).told() == []")

    assert failure is not None
    assert told is None, "the program was asked with a value of the tests"


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("class all(Exception): pass\ndef f(x): return 0", "assert all(f(x) == 42 for x in range(3))"),
        ("class isinstance(Exception): pass\ndef f(x): return ''", "assert isinstance(f(1), int)"),
        ("import operator as math\ndef f(x): return 0", "assert math.ne(f(1), 42)"),
        ("def f(x): raise StopIteration", "assert all(map(lambda x: f(x) == 42, range(3)))"),
        ("class Done(StopIteration): pass\ndef f(x): raise Done", "assert all(map(lambda x: f(x) == 42, range(3)))"),
    ],
    ids=["an exception called all", "an exception called isinstance", "a module called math", "ends the test's loop",
         "ends it by an exception of its own"],
)  # fmt: skip
def test_a_program_decides_neither_what_names_of_the_tests_mean_nor_when_their_loops_end(
    program: str, test: str
) -> None:
    assert failures(program, test)[0] is not None


def test_a_class_named_like_a_builtin_exception_is_raised_as_the_builtin() -> None:
    program = "class TimeoutError(Exception): pass\ndef f(): raise TimeoutError('late')"

    assert failures(
        program, "try:\n    f()\n    assert False\nexcept TimeoutError as e:\n    assert str(e) == 'late'"
    ) == [None]


@pytest.mark.parametrize("name", ["__builtins__", "__name__", "abs", "a b", "math"])
def test_names_that_a_forged_channel_defines_are_left_out(name: str) -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        values.send(theirs, {"defined": [[name, "value", ["dict", []]], [name, "exception", [name, "Exception"]]]})
        program = Program(mine)
        assert program.load() is None
        assert program.names == {}


@pytest.mark.parametrize("cheat", CHEATS)
def test_no_program_passes_without_the_right_values(cheat: str) -> None:
    tests = (
        "assert f(1) == 42",
        "import math\nassert abs(f(1) - 42) < 1e-6",
        "assert math.isclose(f(1), 42)",
        "assert all(f(x) == 42 for x in range(3))",
    )
    assert None not in failures(CHEATS[cheat], *tests)


def _answering(answer: Callable[[dict[str, Any]], Any]) -> list[str | None]:
    """A program that writes to the channel itself."""
    mine, theirs = socket.socketpair()

    def serve() -> None:
        with theirs:
            values.send(theirs, {"defined": [["f", "value", ["object", {"number": 0, "type": "function"}]]]})
            order = values.receive(theirs)
            values.send(theirs, answer(order))

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    with mine:
        program = Program(mine)
        assert program.load() is None
        found = [_failure("try:\n    assert f(1) == 42\nexcept Exception:\n    pass", "", program)]
    server.join(10.0)
    return found


@pytest.mark.parametrize(
    "answer",
    [
        {}, [], 3, {"value": {"a": 1}, "changed": []}, {"value": 42}, {"raised": ["SystemExit"], "text": ""},
        {"value": ["Fraction", ["1", "0"]], "changed": []}, {"value": ["Decimal", "x"], "changed": []},
    ],
)  # fmt: skip
def test_nonsense_on_the_channel_is_no_exception_that_a_test_could_expect(answer: Any) -> None:
    assert _answering(lambda order: answer) != [None]
    assert not issubclass(ProgramLostError, Exception)
