# SPDX-License-Identifier: Apache-2.0
"""What generators and the learner did between two steps that overlap, and what they waited for, as the controller knows
it. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, get_args

from podium.cluster import WorkerId
from podium.cluster.deadlines import now_s
from podium.controller.group_flow import GroupFlow
from podium.controller.lent_devices import LentDevices
from podium.roles.interfaces import GeneratorUsage
from podium.rollout.engine import Load, speculation_counts

WaitsFor = Literal["prompts", "tail", "grading", "weights", "other_role", "drain", "tools", "controller"]
"""What an idle worker waits for; docs/metrics.md defines each. `tools` and `controller` are what is left of the time
that generators measure: with an environment, and without."""

OF_LEARNERS: Final[tuple[WaitsFor, ...]] = ("other_role", "tail", "grading")
"""What a learner waits for whose devices are not lent."""


class IdleAccount:
    """Seconds of idle workers by cause: of as many as are idle at the same time."""

    def __init__(self) -> None:
        self._idle: Counter[WaitsFor] = Counter()  # workers, since the last note
        self._since_s = now_s()
        self._seconds: dict[WaitsFor, float] = {}

    def note(self, causes: Iterable[WaitsFor]) -> None:
        """From now on workers are idle for these causes, each named as often as there are workers."""
        until_s = now_s()
        for cause, count in self._idle.items():
            self._seconds[cause] = self._seconds.get(cause, 0.0) + count * (until_s - self._since_s)
        self._idle, self._since_s = Counter(causes), until_s

    def take(self) -> dict[WaitsFor, float]:
        """Seconds since the last call."""
        self.note(self._idle.elements())
        taken, self._seconds = self._seconds, {}
        return taken


def apportioned(seconds: Mapping[WaitsFor, float], measured_s: float, rest: WaitsFor) -> dict[WaitsFor, float]:
    """Causes that add up to what was measured. What the controller does not know of is `rest`; if it knows of more,
    because messages take time, every cause counts for its part."""
    total_s = sum(seconds.values())
    factor = min(1.0, measured_s / total_s) if total_s else 1.0
    parts: dict[WaitsFor, float] = {cause: factor * seconds.get(cause, 0.0) for cause in get_args(WaitsFor)}
    parts[rest] += max(0.0, measured_s - total_s)
    return parts


class OverlapMeter:
    """Measures from the collection of one step to that of the next."""

    def __init__(self, flow: GroupFlow, lent: LentDevices | None, *, has_runners: bool) -> None:
        self._flow, self._lent, self._has_runners = flow, lent, has_runners
        self._usages: Mapping[WorkerId, GeneratorUsage] = {}  # when the last step began, or they joined
        self._began_s = 0.0
        self._num_ended = self._num_moved = 0  # until then
        self.generators, self.learner = IdleAccount(), IdleAccount()
        self.episodes_per_s = 0.0  # of the last step

    def begin(self, usages: Mapping[WorkerId, GeneratorUsage]) -> None:
        """Streams are opened."""
        self._usages, self._began_s = usages, now_s()
        self.generators.take()
        self.learner.take()

    def join(self, usages: Mapping[WorkerId, GeneratorUsage]) -> None:
        """Generators have joined."""
        self._usages = {**usages, **self._usages}

    def take(self, usages: Mapping[WorkerId, GeneratorUsage]) -> dict[str, float]:
        """What the engines did since the last step began, and what they and the learner waited for."""
        before, began_s, num_ended = self._usages, self._began_s, self._flow.num_ended
        self._usages, self._began_s = usages, now_s()
        seconds = self._began_s - began_s  # 0 in a simulation whose step before had no update
        self.episodes_per_s = (num_ended - self._num_ended) / seconds if seconds else 0.0
        self._num_ended = num_ended
        both = [(now, before[worker]) for worker, now in self._usages.items() if worker in before]
        pairs = [(now.load, then.load) for now, then in both]
        num, lent = max(1, len(pairs)), {} if self._lent is None else self._lent.take_metrics()
        if lent:
            num_moved, self._num_moved = self._num_moved, self._flow.num_moved
            lent["moved_episodes"] = float(self._num_moved - num_moved)
        idle_s = sum(now.idle_s - then.idle_s for now, then in both) / num
        return {
            **lent,
            **_speculation(pairs),
            "generated_tokens": lent.get("lent_tokens", 0.0)
            + sum(now.generated_tokens - then.generated_tokens for now, then in pairs),
            "prefilled_tokens": float(sum(now.prefilled_tokens - then.prefilled_tokens for now, then in pairs)),
            "reused_tokens": float(sum(now.reused_tokens - then.reused_tokens for now, then in pairs)),
            "preemptions": float(sum(now.preemptions - then.preemptions for now, then in pairs)),
            "cache_used": max((now.cache_tokens_used / max(1, now.cache_tokens) for now, _ in pairs), default=0.0),
            "seconds": seconds,
            "idle_s": idle_s,
            "install_s": sum(now.install_s - then.install_s for now, then in both) / num,
            **self._idle(idle_s, num),
        }

    def _idle(self, idle_s: float, num_generators: int) -> dict[str, float]:
        rest: WaitsFor = "tools" if self._has_runners else "controller"
        known = {cause: seconds / num_generators for cause, seconds in self.generators.take().items()}
        learner = self.learner.take()
        return {
            **{
                f"idle_s/{cause}": seconds
                for cause, seconds in apportioned(known, idle_s, rest).items()
                if cause == rest or cause not in ("tools", "controller")
            },
            "learner_idle_s": sum(learner.values()),
            **{f"learner_idle_s/{cause}": learner.get(cause, 0.0) for cause in OF_LEARNERS},
        }


def _speculation(pairs: Sequence[tuple[Load, Load]]) -> dict[str, float]:
    """Sums over generators, as each looks now and looked then."""
    total: dict[str, float] = {}
    for now, then in pairs:
        for name, count in speculation_counts(then, now).items():
            total[name] = total.get(name, 0.0) + count
    return total
