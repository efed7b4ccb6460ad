from tests.run.launch.conftest import data, finished, nothing_is_left_running

__all__ = ["data", "finished", "nothing_is_left_running"]
