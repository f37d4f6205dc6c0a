"""A worker of free kernels without a GPU: it answers what the first line of a kernel orders, over the real channel."""

from __future__ import annotations

import os
import re
import time

from outblas.core.evaluation import Evaluation, Speedup, Status, Timing, Verdict
from outblas.judge.bench_cell import Baselines


def make_handler(options, cell):
    def handler(items, emit):
        for index, item in items:
            emit.begin(index)
            order = re.match(r"// order: (\w+)", item.config.text)[1]
            if order == "exit":
                os._exit(3)
            if order == "hang":
                time.sleep(3600)
            emit.done(index, answer(options, cell, item, order))

    return handler


def answer(options, cell, item, order):
    timing = Timing("offline", (2.0, 2.0, 2.0), 2.0, 0.0, 8, 4)
    baselines = Baselines({name: Timing("offline", (4.0,), 4.0, 0.0) for name in options.baselines})
    if order == "pid":
        detail = f"{os.getpid()} {os.path.isdir(cell.folder)}"
        return Evaluation(item.problem, item.config, Status.WRONG, detail, Verdict(Status.WRONG)), None
    if order == "negative":
        timing = Timing("offline", (-2.0,), -2.0, 0.0)
    config = item.config if order != "other" else type(item.config)(item.config.text + "\nint other;")
    verdict, speedup = Verdict(Status.PASSED, ("static", "rules"), "", 0.5), Speedup("cublas", 2.0, 1.9, 2.1)
    counters = {"registers": 1e9}
    return Evaluation(
        item.problem, config, Status.PASSED, "", verdict, timing, {"cublas": 4.0}, speedup, counters
    ), baselines  # fmt: skip


def templates(options):
    """The worker of template candidates beside it: answers with its process."""

    def handler(items, emit):
        for index, item in items:
            emit.begin(index)
            evaluation = Evaluation(item.problem, item.config, Status.WRONG, str(os.getpid()), Verdict(Status.WRONG))
            emit.done(index, (evaluation, None))

    return handler
