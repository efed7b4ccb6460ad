"""The data and trainings of the runtime's tests: a rehearsal is held against them."""

from tests.runtime.conftest import data as data
from tests.runtime.conftest import runs as runs
