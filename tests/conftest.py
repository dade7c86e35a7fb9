"""What holds for every test: the examples that hypothesis makes up are the same in each run, on any machine.

Receives: nothing.
Gives: a profile of hypothesis whose examples follow from the test alone, and which has no limits of time.
"""

from hypothesis import HealthCheck, settings

# other examples in each run would let one run in many fail, and a slow or busy machine runs out of any time
settings.register_profile(
    "the same everywhere",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("the same everywhere")
