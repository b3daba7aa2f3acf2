"""Every suite of what trains, on vgpu."""

from __future__ import annotations

import pytest

from tests.accelerators import suites, vgpu


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("name", suites.SUITES)
def test_a_suite_passes_on_the_device(name: str) -> None:
    vgpu.needed()
    ran = suites.run(name)
    assert ran.passed > 0, ran.said
    assert not ran.failed, ran.said
