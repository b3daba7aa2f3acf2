"""Property tests here have no deadline: other work on the machine must not fail them."""

from hypothesis import HealthCheck, settings

settings.register_profile("planner", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("planner")
