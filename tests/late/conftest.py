"""The data of the runtime's tests."""

from tests.runtime.conftest import data as data
