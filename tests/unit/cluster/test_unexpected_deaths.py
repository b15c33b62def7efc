# SPDX-License-Identifier: Apache-2.0
"""Which deaths of processes that were no workers yet end the start of a pool."""

from __future__ import annotations

from podium.cluster.ray_transport import unexpected


def test_a_death_since_the_start_of_the_pool_counts() -> None:
    assert unexpected([(7, 9.0), (8, 11.0)], [], since_s=10.0) == (8,)


def test_what_dies_soon_after_a_kill_died_of_it() -> None:
    assert unexpected([(7, 12.0), (8, 16.5), (9, 17.5)], [12.0], since_s=10.0) == (9,)


def test_another_pools_kill_does_not_hide_the_death_before_it() -> None:
    """Two pools wait; one hears of the death first, kills its processes and starts anew."""
    assert unexpected([(7, 11.0), (8, 12.5)], [12.0], since_s=10.0) == (7,)
