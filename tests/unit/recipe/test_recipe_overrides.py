# SPDX-License-Identifier: Apache-2.0
"""`--set a.b=c`: the value is typed as YAML types it, and a path that leads nowhere is refused."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.recipes import make_recipe
from podium.errors import RecipeError
from podium.recipe import apply_overrides


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("key=3", 3),
        ("key=2e-5", 2e-5),
        ("key=-1.5", -1.5),
        ("key=true", True),
        ("key=null", None),
        ("key=", None),
        ("key=words with = in them", "words with = in them"),
        ("key='3'", "3"),
        ("key=[1, 2]", [1, 2]),
        ("key={a: 1}", {"a": 1}),
        (" key =3", 3),
    ],
)
def test_a_value_is_read_as_yaml(override: str, value: Any) -> None:
    found = apply_overrides({}, [override])

    assert found == {"key": value}
    assert type(found["key"]) is type(value)


def test_a_path_makes_the_sections_it_goes_through() -> None:
    assert apply_overrides({"b": None}, ["a.x.y=1", "b.z=2"]) == {"a": {"x": {"y": 1}}, "b": {"z": 2}}


def test_a_number_is_a_position_in_a_list() -> None:
    values = {"data": {"train": [{"path": "a"}, {"path": "b"}]}}

    found = apply_overrides(values, ["data.train.1.weight=0.5", "data.train.0=x"])

    assert found == {"data": {"train": ["x", {"path": "b", "weight": 0.5}]}}


def test_the_given_values_are_not_touched() -> None:
    values = {"a": {"b": [1, 2]}}

    apply_overrides(values, ["a.b.0=9", "a.c=1"])

    assert values == {"a": {"b": [1, 2]}}


def test_later_overrides_win() -> None:
    assert apply_overrides({}, ["a=1", "a=2"]) == {"a": 2}


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("steps", r"--set steps: .*key\.path=value.*--set optimizer\.lr=2e-5\b"),
        ("=3", r"--set =3: .*key\.path=value"),
        ("steps={a", r"--set steps=\{a: .*YAML"),
        ("steps={a: 1, a: 2}", "'a'.*twice"),
        ("data.train.1.path=x", r"data\.train .*'1' .*\(0 to 0\)"),
        ("data.train.first.path=x", r"data\.train .*'first' .*\(0 to 0\)"),
        ("data.train.-1.path=x", r"data\.train .*'-1' .*\(0 to 0\)"),
        ("steps.x=1", r"--set steps\.x=1: steps .*plain value"),
    ],
)
def test_an_override_that_leads_nowhere_is_refused(override: str, complaint: str) -> None:
    with pytest.raises(RecipeError, match=complaint):
        make_recipe(override)


def test_a_position_in_an_empty_list_is_refused_without_a_senseless_range() -> None:
    with pytest.raises(RecipeError) as caught:
        make_recipe("data.heldout=[]", "data.heldout.0.path=x")

    assert "data.heldout" in str(caught.value)
    assert "0 to -1" not in str(caught.value)


def test_an_override_with_a_misspelt_key_is_refused_like_one_in_the_file() -> None:
    with pytest.raises(RecipeError, match=r"optimizer\.lrr: [^,]* optimizer\.lr\b"):
        make_recipe("optimizer.lrr=1e-3")
