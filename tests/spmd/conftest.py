# SPDX-License-Identifier: Apache-2.0
"""One start of two ranks for several modules: starting them costs much more than their work.

A module that takes part has `make_folder(folder)`, which writes its models, and `on_two_ranks(folder)`, which returns
what both ranks call. A call that fails fails the tests of all these modules, with the traceback of that call.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.ranks import ranks_in_turn
from podium.spmd.launch import launch


@pytest.fixture(scope="session")
def module_folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModuleType], Path]:
    folders: dict[str, Path] = {}

    def folder_of(module: ModuleType) -> Path:
        if module.__name__ not in folders:
            folders[module.__name__] = tmp_path_factory.mktemp(module.__name__)
            module.make_folder(folders[module.__name__])
        return folders[module.__name__]

    return folder_of


@pytest.fixture(scope="session")
def results_of_two_ranks(
    request: pytest.FixtureRequest,
    module_folders: Callable[[ModuleType], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What rank 0 returned, for each collected module that takes part."""
    modules = {item.module.__name__: item.module for item in request.session.items if isinstance(item, pytest.Function)}
    modules = {name: module for name, module in modules.items() if hasattr(module, "on_two_ranks")}
    calls = [module.on_two_ranks(module_folders(module)) for module in modules.values()]
    stop_file = tmp_path_factory.mktemp("two-ranks") / "stop"
    results = launch(ranks_in_turn, (calls,), ranks=2, restarts=0, stop_file=stop_file)
    return dict(zip(modules, results, strict=True))


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, module_folders: Callable[[ModuleType], Path]) -> Path:
    return module_folders(request.module)


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest, results_of_two_ranks: dict[str, Any]) -> Any:
    """What rank 0 returned for this module."""
    return results_of_two_ranks[request.module.__name__]
