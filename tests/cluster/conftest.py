"""What the tests of several clusters share."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.cluster import clusters


@pytest.fixture(scope="session")
def one_machine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], clusters.Expected]:
    """What one machine makes of about so many tokens, which it counts once."""
    return functools.cache(lambda n_tokens: clusters.on_one_machine(tmp_path_factory.mktemp("one"), n_tokens))
