# SPDX-License-Identifier: Apache-2.0
"""The verifier `code` and the sandbox as rewards use them: in grading processes, in tools, and from Python."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest

from podium.data.trajectories import TrajectoryId
from podium.environments.code_tests import code
from podium.environments.grading import Grade
from podium.environments.hosted_grading import HostedGrader
from podium.environments.output_cap import OutputCap
from podium.environments.reward_service import RewardSpec
from podium.environments.sandbox import Sandbox, SandboxLimits, isolation
from podium.environments.signatures import Sample
from podium.errors import SandboxError
from podium.recipe import VerifierReward
from podium.recipe.on_policy import SandboxSection

DOUBLE = "```python\nprint(int(input()) * 2)\n```"
STDIO = [{"input": "1\n", "output": "2\n"}, {"input": "5\n", "output": "10\n"}]
ASSERTS = ["assert double(1) == 2", "assert double(5) == 10"]


def graded(sandbox: Sandbox, answer: str, row: dict[str, Any], **options: Any) -> dict[str, float]:
    return asyncio.run(code(answer, None, row, sandbox=sandbox, **options))


def test_a_program_is_graded_by_what_it_prints(sandbox: Sandbox) -> None:
    constant = "```python\ninput(); print(2)\n```"

    assert graded(sandbox, DOUBLE, {"tests": STDIO}) == {"score": 1.0, "passed": 1.0}
    assert graded(sandbox, constant, {"tests": STDIO}) == {"score": 0.0, "passed": 0.5}
    assert graded(sandbox, constant, {"tests": STDIO}, score="fraction") == {"score": 0.5, "passed": 0.5}
    assert graded(sandbox, "```bash\nread x; echo $((x * 2))\n```", {"tests": STDIO}, language="shell")["score"] == 1.0


def test_functions_are_graded_by_asserts(sandbox: Sandbox) -> None:
    right, wrong = "```python\ndef double(x): return 2 * x\n```", "```python\ndef double(x): return x + 1\n```"

    assert graded(sandbox, right, {"tests": ASSERTS})["score"] == 1.0
    assert graded(sandbox, wrong, {"tests": ASSERTS}, score="fraction")["score"] == 0.5
    assert graded(sandbox, wrong, {"tests": ASSERTS})["score"] == 0.0
    humaneval = {"tests": "def check(candidate):\n    assert candidate(2) == 4", "entry_point": "double"}
    assert graded(sandbox, right, humaneval)["score"] == 1.0


CHEATS = {
    "prints the pass marker": "print('{\"test\": 0, \"failure\": null}')\nprint('PASSED')",
    "ends itself well": "import os\nos._exit(0)",
    "ends itself well in the call": "import os\ndef double(x): os._exit(0)",
    "kills what it finds": "import os\ndef double(x): os.kill(-1, 9)",
    "writes to every descriptor": (
        'import os\nline = b\'{"loaded": true}\\n{"test": 0, "failure": null}\\n{"test": 1, "failure": null}\\n\'\n'
        "for fd in range(256):\n    try: os.write(fd, line)\n    except OSError: pass\ndef double(x): return 0"
    ),
    "looks for the tests": (
        "import os\nfound = []\n"
        "for folder, _, names in os.walk('/proc'):\n"
        "    for name in ('cmdline', 'environ', 'maps'):\n"
        "        try: found.append(open(os.path.join(folder, name), 'rb').read())\n"
        "        except OSError: pass\n"
        "    if folder.count('/') > 2: break\n"
        "def double(x): return 2 * x if any(b'double(' in each for each in found) else 0"
    ),
    "takes forever": "def double(x):\n    while True: pass",
    "takes forever at once": "while True: pass",
    "fills memory": "def double(x): return [0] * 10**9",
    "answers too much": "def double(x): return 'x' * (1 << 25)",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_no_cheat_passes_asserts(sandbox: Sandbox, cheat: str) -> None:
    result = sandbox.test(CHEATS[cheat], ASSERTS, wall_s=1.0)

    assert result.num_passed == 0, result.failures


AGREES = (
    "class A:\n    def __sub__(self, other): return 0.0\n    def __rsub__(self, other): return 0.0\n"
    "    def __contains__(self, item): return True\n    def startswith(self, text): return True\n"
    "def double(x): return A()"
)


def test_no_object_that_agrees_passes_asserts_with_operators(sandbox: Sandbox) -> None:
    asserts = [
        "assert abs(double(1) - 2) < 1e-6", "assert abs(2 - double(1)) < 1e-6", "assert 2 in double(1)",
        "assert double(1).startswith('2')",
    ]  # fmt: skip
    result = sandbox.test(AGREES, asserts)

    assert result.num_passed == 0, result.failures
    honest = "def double(x): return 2.0 * x"
    assert sandbox.test(honest, asserts[:2]).num_passed == 2


@pytest.mark.parametrize("cheat", ["prints the pass marker", "ends itself well", "writes to every descriptor"])
def test_no_cheat_passes_by_output(sandbox: Sandbox, cheat: str) -> None:
    assert graded(sandbox, f"```python\n{CHEATS[cheat]}\n```", {"tests": STDIO})["passed"] == 0.0


@pytest.mark.slow
def test_tests_behind_one_that_ends_the_program_get_a_new_one(sandbox: Sandbox) -> None:
    program = "import os, time\ndef f(x):\n    if x == 1: os._exit(0)\n    if x == 2: time.sleep(60)\n    return x"

    result = sandbox.test(program, [f"assert f({x}) == {x}" for x in range(4)], wall_s=3.0)

    assert [failure is None for failure in result.failures] == [True, False, False, True]
    assert result.failures[2] == "took longer than 3 s"
    assert result.share == 0.5


def test_what_does_not_fit_in_the_time_fails(sandbox: Sandbox) -> None:
    result = sandbox.test("import time\ndef f(): time.sleep(60)", ["f()"] * 100, most_s=1.0)

    assert result.num_passed == 0
    assert result.failures[-1] == "was not run: the time for all tests was over"


def sample(index: int, answer: str, row: dict[str, Any]) -> Sample:
    return Sample(
        id=TrajectoryId(index, 0), group=index, prompt_text="p", messages=None, answer=answer,
        reference=None, row=row, source="rows", num_tokens=1,
    )  # fmt: skip


def hosted(samples: Sequence[Sample], section: SandboxSection, *, timeout_s: float) -> list[Grade]:
    spec = RewardSpec(
        sections={"train": ((VerifierReward(verifier="code"),), "reward")}, timeout_s=timeout_s, also_scored=False,
        sandbox=section,
    )  # fmt: skip

    async def grade() -> list[Grade]:
        grader = HostedGrader(spec, output=OutputCap("test"))
        try:
            await grader.open()
            return await grader.grade("train", samples)
        finally:
            grader.close()

    return asyncio.run(grade())


@pytest.mark.slow
def test_a_grading_process_runs_many_programs_and_a_hanging_one_is_wrong_and_no_failure(sandbox: Sandbox) -> None:
    answers = [DOUBLE, "```python\nwhile True: pass\n```", "```python\nprint(3)\n```", "no program"] * 5
    samples = [sample(at, answer, {"tests": STDIO}) for at, answer in enumerate(answers)]

    grades = hosted(samples, SandboxSection(wall_s=2.0, workers=3), timeout_s=60.0)

    assert [grade.error for grade in grades] == [None] * 20
    assert [grade.total for grade in grades] == [1.0, 0.0, 0.0, 0.0] * 5
    assert grades[0].extras == {"code/passed": 1.0}


def test_without_isolation_the_start_is_refused_and_allow_unsafe_runs_with_limits(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(isolation.shutil, "which", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(SandboxError, match="not installed"):
        Sandbox().run("print(1)")

    box = Sandbox(SandboxLimits(memory_mib=256, output_kib=8), workers=1, allow_unsafe=True)
    try:
        assert box.run("print(1)").text == "1\n"
        assert box.run("print(open('there').read())", files={"there": "x"}).text == "x\n"
        assert "MemoryError" in box.run("x = bytearray(10**9)").error_text
        assert box.run("while True: print('x' * 100)").stopped_by == "output_kib"
        assert box.run("import time; time.sleep(60)", wall_s=0.5).stopped_by == "wall_s"
        assert box.test("def f(): return 1", ["assert f() == 1", "assert f() == 2"]).num_passed == 1
        assert not box.is_isolated
    finally:
        box.close()
    assert "sandbox.allow_unsafe: programs run without isolation" in capfd.readouterr().err


def test_files_input_and_arguments_reach_the_program(sandbox: Sandbox) -> None:
    program = "import sys, helper\nprint(helper.x, sys.argv[1:], sys.stdin.read())\nsys.exit(3)"

    result = sandbox.run(program, stdin="in", args=["a", "b"], files={"helper.py": "x = 7"})

    assert (result.text, result.exit_code) == ("7 ['a', 'b'] in\n", 3)
    with pytest.raises(SandboxError, match="outside"):
        sandbox.run("", files={"../x": ""})


def test_large_input_and_a_program_that_does_not_read_it(sandbox: Sandbox) -> None:
    assert sandbox.run("import sys; print(len(sys.stdin.read()))", stdin="x" * 3_000_000).text == "3000000\n"
    assert sandbox.run("print(1)", stdin="x" * 3_000_000).text == "1\n"


def test_another_interpreter_has_its_packages(sandbox: Sandbox) -> None:
    packages = str(Path(numpy.__file__).parents[1])  # an environment may borrow them from another
    box = Sandbox(SandboxLimits(), workers=1, python=sys.executable, paths=[packages])
    try:
        assert box.run("import numpy; print(numpy.arange(3).sum())").text == "3\n"
    finally:
        box.close()


def test_programs_run_at_the_same_time(sandbox: Sandbox) -> None:
    async def both() -> list[str]:
        results = await asyncio.gather(*(sandbox.run_async(f"print({at})") for at in range(8)))
        return [result.text for result in results]

    assert asyncio.run(both()) == [f"{at}\n" for at in range(8)]
