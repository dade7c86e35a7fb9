"""What holds for every test: chance is the same in each run, on any machine.

Receives: nothing.
Gives: a profile of hypothesis whose examples follow from the test alone, and which has no limits of time; a folder of
temporary files that is gone afterwards; generators at one seed before each test.
"""

import os
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, settings

from clipwise.records.chance import seeded

# other examples in each run would let one run in many fail, and a slow or busy machine runs out of any time
settings.register_profile(
    "the same everywhere",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("the same everywhere")

# already now: what the tests import settles on a folder for compiled code
_COMPILED = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _COMPILED.name


@pytest.fixture(autouse=True, scope="session")
def _nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What else torch writes, such as torchrun's logs, lies with the tests' other files, which are gone afterwards."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(tmp_path_factory.mktemp("temporary"))


@pytest.fixture(autouse=True)
def _the_same_numbers() -> None:
    """Weights and data that a test draws are the same ones each time, whichever tests ran before it.

    In one thread: two workers on two cores with two each mostly wait for one another.
    """
    torch.set_num_threads(1)
    seeded(0)
