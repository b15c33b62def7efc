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
    "answer", [{}, [], 3, {"value": {"a": 1}, "changed": []}, {"value": 42}, {"raised": ["SystemExit"], "text": ""}]
)
def test_nonsense_on_the_channel_is_no_exception_that_a_test_could_expect(answer: Any) -> None:
    assert _answering(lambda order: answer) != [None]
    assert not issubclass(ProgramLostError, Exception)
