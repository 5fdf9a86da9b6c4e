"""Hypothesis profiles: `ci` and `quick` derandomised, `dev` fresh, `thorough` long."""

from datetime import timedelta

from hypothesis import HealthCheck, Phase, settings

NAMES = ("ci", "quick", "dev", "thorough")


def register_profiles() -> None:
    """Register the profiles.

    ``ci``: 40 examples, the same ones in every run.  ``quick``: the first 8.  ``dev``: 15 fresh examples.
    ``thorough``: 1,000 fresh examples.
    No deadline: a reference that grows one node at a time is slow by design, and wall time is not a property.
    """
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    common = settings(deadline=None, suppress_health_check=quiet)
    settings.register_profile("ci", common, max_examples=40, derandomize=True, database=None)
    settings.register_profile("quick", common, max_examples=8, derandomize=True, database=None)
    settings.register_profile("dev", common, max_examples=15)
    settings.register_profile("thorough", common, max_examples=1000, phases=tuple(Phase), deadline=timedelta(minutes=5))
