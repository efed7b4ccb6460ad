"""The data and trainings of the runtime's tests: a rehearsal is held against them."""

from tests.train.runtime.conftest import data as data
from tests.train.runtime.conftest import runs as runs
