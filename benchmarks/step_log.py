"""What logging a step costs a rank: `python -m benchmarks.step_log [--step-ms 30]`.

Times StepLog.add (records/rundir/step_log.py) and what the timers of messages do for it
(train/transport/timing.py), and prints both as a share of a step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

from mpctl.records.rundir.step_log import STEP_LOG_BYTES, StepLog
from mpctl.train.transport.timing import Collective, SecondsByAxis

MESSAGES = 60
"""Of a step: 8 micro batches of the demo's two layers at tp 2, gradients and status."""
ROUNDS, CALLS = 9, 2000


def microseconds(call: Callable[[], object]) -> float:
    """The median over ROUNDS of the mean time of CALLS calls."""
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(CALLS):
            call()
        times.append(1e6 * (time.process_time() - began) / CALLS)
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=30.0, help="length of a step")
    step = 1e3 * parser.parse_args().step_ms
    log, timer = StepLog(memoryview(bytearray(STEP_LOG_BYTES))), SecondsByAxis()
    waits, sizes = {0: 0.01, 1: 0.002, 2: 0.0003}, {0: 4096, 1: 8, 2: 8}
    logged = microseconds(lambda: log.add(7, seconds=0.03, computing=0.02, processor=0.02, waits=waits, sizes=sizes))
    message = Collective("all_reduce", "tp", 4096, "float32", 0)

    def counted() -> None:
        timer.of_groups[0] = timer.of_groups.get(0, 0.0) + 1e-6
        timer.count(message)

    of_messages = MESSAGES * microseconds(counted)
    both = logged + of_messages
    print(f"logging a step: {logged:.1f} us; {MESSAGES} messages by group: {of_messages:.1f} us")
    print(f"together {both / step:.4%} of a step of {step / 1e3:g} ms")


if __name__ == "__main__":
    main()
