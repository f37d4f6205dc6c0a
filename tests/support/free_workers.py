"""A worker of free kernels without a GPU: it answers what the first line of a kernel orders, over the real channel.

Some orders are those of a kernel that has taken the worker over: it sends what it likes, over the worker's own pipe.
"""

from __future__ import annotations

import json
import os
import re
import time

from outblas.core.evaluation import Evaluation, Speedup, Status, Timing, Verdict
from outblas.judge.bench_cell import Baselines
from outblas_lab.jail.jailed_evaluator import encode
from support.helpers import running

#: Environment variable with the path of the file of :func:`note`.
LOG = "OUTBLAS_TEST_WORKERS"
ESCAPES = "\x1b]0;PWN\x07\x1b[2J\x9b2J\u202e"


def note(word):
    """Append a word and this process to the file of :data:`LOG`, if the test has named one."""
    if path := os.environ.get(LOG):
        with open(path, "a") as log:
            log.write(f"{word} {os.getpid()}\n")


def notes():
    """Words and processes, in the order in which they were noted."""
    with open(os.environ[LOG]) as log:
        return [(word, int(pid)) for word, pid in map(str.split, log)]


def prepare():
    """Called in a worker before its turn."""
    note("prepared")


def until(condition):
    """Wait until it holds, for a minute at most."""
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def next_is_prepared():
    """True once another worker was prepared after this one's turn."""
    log = notes()
    return any(word == "prepared" for word, _ in log[log.index(("turn", os.getpid())) :])


def make_handler(options, cell):
    """Begin where a real worker begins to use the GPU."""
    if LOG in os.environ and any(word == "turn" and running(pid) for word, pid in notes()):
        note("overlap")
    note("turn")

    def handler(items, emit):
        for index, item in items:
            emit.begin(index)
            order = re.match(r"// order: (\w+)", item.config.text)[1]
            if order == "exit":
                os._exit(3)
            if order == "next":
                until(next_is_prepared)
                note("judged")
                order = "pid"
            if order == "hang":
                time.sleep(3600)
            if order in ("fault", "error", "float", "words"):
                emit._connection._connection.send_bytes(
                    json.dumps(hostile_message(options, cell, item, index, order)).encode()
                )
                continue
            emit.done(index, answer(options, cell, item, order))

    return handler


def hostile_message(options, cell, item, index, order):
    """A message with words that no file can hold and that a terminal obeys, or of an index that is none."""
    if order == "float":
        return ["begin", float(index)]
    if order == "words":
        return ["done", index, with_hostile_words(encode(answer(options, cell, item, "pid")))]
    return [order, f"\ud800{ESCAPES}" + "x" * 100_000]


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


def with_hostile_words(value):
    """An answer of :func:`outblas_lab.jail.jailed_evaluator.encode` with a surrogate and escapes in every word."""
    word = f"\ud800{ESCAPES}word"
    told = value["evaluation"]
    told["detail"] = told["log"] = told["verdict"]["detail"] = word
    told["verdict"]["gates"] = [word]
    told["baselines_us"] = {word: 4.0}
    told["counters"] = {word: 1.0}
    for timing in (told["timing"], *(value["baselines"] or {"timings": {}})["timings"].values()):
        if timing is not None:
            timing["mode"] = word
    if told["speedup"] is not None:
        told["speedup"]["baseline"] = word
    if value["baselines"] is not None:
        timings = value["baselines"]["timings"]
        value["baselines"] = {"timings": {word: next(iter(timings.values()))}, "details": {word: word},
                              "left_out": {word: word}}  # fmt: skip
    return value
