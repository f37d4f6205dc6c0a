"""A worker that has been taken over: it sends what the first line of a kernel orders, over the worker's own pipe."""

from __future__ import annotations

import json
import os
import re

from outblas.jail.answers import encode
from support.free_workers import answer

ESCAPES = "\x1b]0;PWN\x07\x1b[2J\x9b2J\u202e"


def make_handler(options, cell):
    def handler(items, emit):
        pipe = emit._connection._connection
        for index, item in items:
            emit.begin(index)
            order = re.match(r"// order: (\w+)", item.config.text)[1]
            if order in ("fault", "error"):
                pipe.send_bytes(json.dumps([order, f"\ud800{ESCAPES}" + "x" * 100_000]).encode())
            elif order == "float":
                pipe.send_bytes(json.dumps(["begin", float(index)]).encode())
                os._exit(3)
            elif order == "words":
                told = hostile(encode(answer(options, cell, item, "pid")))
                pipe.send_bytes(json.dumps(["done", index, told]).encode())
            else:
                emit.done(index, answer(options, cell, item, order))

    return handler


def hostile(value):
    """An answer of :func:`outblas.jail.answers.encode` with a surrogate and escapes in every word."""
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
