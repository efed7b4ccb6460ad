"""The data of the runtime's tests."""

from tests.train.runtime.conftest import data as data
