# SPDX-License-Identifier: Apache-2.0
"""What the scheduler keeps of groups and workers, in structures that answer without looking at all of them. Torch-free.

A step may claim thousands of groups and a commit reach a thousand workers. Nothing here takes time in proportion to
that, but for copies of sorted lists, which cost nanoseconds an entry."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice

# Claimed groups that are forgotten with a decision. Every group has more events than that takes.
_FORGOTTEN_AT_ONCE = 16


@dataclass(slots=True, kw_only=True)
class ScheduledGroup:
    """All episodes of one prompt, until a step claims them."""

    number: int
    deadline: int  # the last step that may train on it
    missing: set[int]  # samples that have not ended
    waiting: set[int]  # of them, those that no worker runs
    attempts: dict[int, int] = field(default_factory=dict)  # by sample: how often a worker was lost with it, if it was
    newest: dict[str, int] = field(default_factory=dict)  # worker -> newest version among the tokens it sampled


@dataclass(slots=True, kw_only=True)
class ScheduledWorker:
    """A generator, or an episode runner."""

    name: str
    lanes: int
    version: int  # acknowledged
    sent: int  # the last version that it was told to install
    is_lent: bool
    is_leaving: bool = False  # it is given nothing more
    running: set[int] = field(default_factory=set)  # episodes: group x samples of a group + sample
    share: int = 0  # most episodes that it is given: its lanes, or its part of all that may run
    entry: tuple[float, str] | None = None  # its place among the free workers
    newest: int = -1  # version among the tokens that it sampled

    @property
    def load(self) -> float:
        """Its episodes as part of its share. Below 1 it gets a further group; what exceeds its lanes waits there."""
        return len(self.running) / self.share


class FreeWorkers:
    """Workers that may get a group, the one with the lowest load first."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, str]] = []  # (load, name), ascending

    def __bool__(self) -> bool:
        return bool(self._entries)

    def place(self, worker: ScheduledWorker) -> None:
        """Puts a worker where its load belongs; nowhere if it is full or leaves."""
        self.remove(worker)
        if len(worker.running) < worker.share and not worker.is_leaving:
            worker.entry = (worker.load, worker.name)
            insort(self._entries, worker.entry)

    def remove(self, worker: ScheduledWorker) -> None:
        """Takes a worker out, if it is there."""
        if worker.entry is not None:
            del self._entries[bisect_left(self._entries, worker.entry)]
            worker.entry = None

    def pop(self, workers: Mapping[str, ScheduledWorker]) -> ScheduledWorker:
        """Takes the first one out."""
        worker = workers[self._entries.pop(0)[1]]
        worker.entry = None
        return worker


class LiveGroups:
    """Groups that no step has claimed, by deadline. All are in `by_number`, and claimed ones for a while after that."""

    def __init__(self) -> None:
        self.by_number: dict[int, ScheduledGroup] = {}
        self.due: Counter[int] = Counter()  # deadline -> groups
        self.num_graded = 0
        self.num_ended = 0  # groups whose episodes have all ended, and that are not graded
        self._graded: dict[int, list[int]] = {}  # deadline -> graded groups, ascending
        self._ungraded: dict[int, dict[int, ScheduledGroup]] = {}  # deadline -> the others, in the order of numbers
        self._num_missing: Counter[int] = Counter()  # deadline -> episodes of these that have not ended
        self._num_ended: Counter[int] = Counter()  # deadline -> of these groups
        self._claimed: deque[Iterator[int]] = deque()  # to be forgotten, by step

    @property
    def num_unfinished(self) -> int:
        """Episodes that have not ended."""
        return self._num_missing.total()

    def numbers(self) -> list[int]:
        """All that no step has claimed, ascending."""
        return sorted(
            number for groups in (*self._graded.values(), *self._ungraded.values()) for number in groups
        )  # fmt: skip

    def add(self, group: ScheduledGroup) -> None:
        """A new group, with a higher number than all before."""
        self.by_number[group.number] = group
        self.due[group.deadline] += 1
        self._ungraded.setdefault(group.deadline, {})[group.number] = group
        self._num_missing[group.deadline] += len(group.missing)

    def end(self, group: ScheduledGroup, sample: int) -> None:
        """An episode of it has ended."""
        group.missing.discard(sample)
        self._num_missing[group.deadline] -= 1
        if not group.missing:
            self._count_ended(group.deadline, 1)

    def grade(self, group: ScheduledGroup) -> None:
        """All its episodes have their rewards."""
        del self._ungraded[group.deadline][group.number]
        insort(self._graded.setdefault(group.deadline, []), group.number)
        self.num_graded += 1
        self._count_ended(group.deadline, -1)

    def drop(self, group: ScheduledGroup) -> None:
        """A group that is void and was not graded."""
        del self.by_number[group.number]
        del self._ungraded[group.deadline][group.number]
        self._count_ended(group.deadline, -1)
        self._leave(group.deadline, 1)

    def leave_room(self, deadline: int, rooms: Mapping[int, int]) -> bool:
        """Whether there is room for one more group with this deadline. `rooms`: by deadline, how many groups the steps
        until then can train; of this deadline and all that groups have."""
        later = sorted({deadline, *(each for each, count in self.due.items() if count and each > deadline)})
        return all(
            sum(count for each, count in self.due.items() if each <= until) < rooms[until] for until in later
        )  # fmt: skip

    def num_graded_by(self, deadline: int) -> int:
        """Graded groups with this deadline."""
        return len(self._graded.get(deadline, ()))

    def num_ended_by(self, deadline: int) -> int:
        """Groups with this deadline whose episodes have all ended, graded or not."""
        return self.num_graded_by(deadline) + self._num_ended[deadline]

    def nearest(self, most: int) -> dict[int, int]:
        """The graded groups with the nearest deadlines: how many of each deadline. Of these the first ones of the data
        count."""
        taken: dict[int, int] = {}
        for deadline in sorted(self._graded):
            taken[deadline] = min(most, len(self._graded[deadline]))
            most -= taken[deadline]
        return taken

    def is_among(self, taken: Mapping[int, int], group: ScheduledGroup) -> bool:
        """Whether a group is one of those that `nearest` counts."""
        numbers = self._graded.get(group.deadline, [])
        at = bisect_left(numbers, group.number)
        return at < taken.get(group.deadline, 0) and numbers[at] == group.number

    def claim(self, taken: Mapping[int, int]) -> tuple[int, ...]:
        """A step takes the groups that `nearest` counts. Their numbers, ascending."""
        parts: list[list[int]] = []
        for deadline, count in taken.items():
            of_deadline = self._graded[deadline]
            if count == len(of_deadline):  # without a copy, which would look at every number
                parts.append(self._graded.pop(deadline))
            elif count:
                parts.append(of_deadline[:count])
                del of_deadline[:count]
            self._leave(deadline, count)
        numbers = tuple(parts[0] if len(parts) == 1 else sorted(chain.from_iterable(parts)))
        self.num_graded -= len(numbers)
        self._claimed.append(iter(numbers))
        return numbers

    def forget_claimed(self) -> Iterator[int]:
        """Forgets some claimed groups: to free thousands takes longer than a decision may."""
        if self._claimed:
            numbers = list(islice(self._claimed[0], _FORGOTTEN_AT_ONCE))
            for number in numbers:
                del self.by_number[number]
                yield number
            if not numbers:
                self._claimed.popleft()

    def missing(self, num_wanted: int, step: int) -> tuple[int, int]:
        """Groups that are not graded and that the next step waits for: `num_wanted`, or more if more are due by `step`.
        Episodes of them that have not ended, nearest deadlines first, and how many groups there are too few."""
        num_due = sum(len(groups) for deadline, groups in self._ungraded.items() if deadline <= step)
        num_left, num_episodes = max(num_wanted, num_due), 0
        for deadline in sorted(self._ungraded):
            groups = self._ungraded[deadline]
            num_taken = min(num_left, len(groups))
            num_left -= num_taken
            if 2 * num_taken <= len(groups):
                num_episodes += sum(len(group.missing) for group in islice(groups.values(), num_taken))
            else:  # all but the last ones
                others = islice(reversed(groups.values()), len(groups) - num_taken)
                num_episodes += self._num_missing[deadline] - sum(len(group.missing) for group in others)
        return num_episodes, num_left

    def _count_ended(self, deadline: int, change: int) -> None:
        self.num_ended += change
        self._num_ended[deadline] += change

    def _leave(self, deadline: int, count: int) -> None:
        self.due[deadline] -= count
        if not self.due[deadline]:
            del self.due[deadline]
            self._graded.pop(deadline, None)
            self._ungraded.pop(deadline, None)
            self._num_missing.pop(deadline, None)
            self._num_ended.pop(deadline, None)
