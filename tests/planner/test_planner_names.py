"""The planner's public names: each is there, loaded when it is first used, and no other name is."""

import elasticd_planner
import pytest
from elasticd_planner.layout.layouts import Layouts
from elasticd_planner.problem import Problem


def test_every_public_name_is_there_and_is_the_one_of_its_module() -> None:
    assert all(getattr(elasticd_planner, name) is not None for name in elasticd_planner.__all__)
    assert elasticd_planner.Problem is Problem
    assert elasticd_planner.Layouts is Layouts


def test_another_name_is_refused_as_of_any_module() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Search'"):
        _ = elasticd_planner.Search
