"""Handlers for the sandbox's tests: module-level, so that a spawned worker can import them."""

from __future__ import annotations

import ctypes
import os
import time


def doubler():
    """Doubles numbers; words misbehave."""

    def handler(items, emit):
        for index, item in items:
            emit.begin(index)
            if item == "hang":
                time.sleep(3600)
            elif item == "exit":
                os._exit(0)
            elif item == "sysexit":
                raise SystemExit(3)
            elif item == "segfault":
                ctypes.string_at(0)
            elif item == "fault":
                from outblas.judge.faults import ContextLost

                raise ContextLost("CUDA_ERROR_ILLEGAL_ADDRESS: sync")
            elif item == "raise":
                raise ValueError("a bug of the evaluator")
            elif item == "pid":
                emit.done(index, os.getpid())
                continue
            emit.done(index, item * 2)

    return handler


def late():
    """Answers a batch only in the end, together; a batch with a culprit dies unannounced."""

    def handler(items, emit):
        emit.begin(None)
        if any(item == "exit" for _, item in items):
            os._exit(7)
        for index, item in items:
            emit.done(index, item * 2)

    return handler


class _Accounting:
    def __init__(self):
        from outblas.core.phase_times import PhaseTimer

        self.phase_timer = PhaseTimer("idle")
        self.phase_timer.count("started")

    def __call__(self, items, emit):
        with self.phase_timer.phase("batch"):
            for index, item in items:
                self.phase_timer.count("items")
                if item == "exit":
                    os._exit(7)
                emit.done(index, item)


def accounting():
    """Gives numbers back, and accounts for it."""
    return _Accounting()


def silent():
    """Leaves the last item unanswered."""

    def handler(items, emit):
        for index, item in items[:-1]:
            emit.done(index, item)

    return handler


def unable():
    raise RuntimeError("no GPU here")


def dies_at_birth():
    os._exit(9)


def dies_compiling(source, arch):
    os._exit(9)


def evaluations(options):
    """Evaluations without a GPU: the first config passes, split_k > 1 hangs, stages > 4 exits."""
    from outblas.core.evaluation import Evaluation, Status, Timing
    from outblas.tune.live_evaluator import Baselines

    timing = Timing("offline", (2.0, 2.0, 2.0), 2.0, 0.0)

    def handler(items, emit):
        for index, (problem, config, *_) in items:
            emit.begin(index)
            found = Baselines({"cublas": timing}, {"cublas": "default"}, {})
            if config is None:
                emit.done(index, (None, found))
                continue
            if config.split_k > 1:
                time.sleep(3600)
            if config.stages > 4:
                os._exit(1)
            emit.done(index, (Evaluation(problem, config, Status.PASSED, timing=timing), found))

    return handler


def prover(device):
    """Proves cheats by name."""
    from outblas.judge.gates import prove
    from support import cheat_tools

    def handler(items, emit):
        for index, (name, problem) in items:
            emit.begin(index)
            try:
                verdict = prove(cheat_tools.load(name).make(), problem, device=device)
            except RuntimeError as error:
                if device != "cpu":
                    from outblas.judge.faults import ContextLost
                    from outblas.runtime.driver import sticky_error

                    if sticky_error():
                        raise ContextLost(f"{sticky_error()}: {error}") from error
                raise
            emit.done(index, verdict)

    return handler


def encode(value):
    return value


def decode(data):
    if not isinstance(data, (int, str)):
        raise ValueError("no answer")
    return data


class _Unpickled:
    """An object whose unpickling makes a file."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return open, (self._path, "w")


def jailed(folder):
    """A doubler behind bars; words misbehave, or send what is no answer over the worker's own pipe."""
    import pickle

    from outblas_lab.jail.confinement import Jail

    jail = Jail(folder)
    jail.environment()
    jail.files()
    double = doubler()
    jail.calls()

    def handler(items, emit):
        pipe = emit._connection._connection
        for index, item in items:
            if item == "fill":
                emit.begin(index)
                kept = []
                while True:
                    kept.append(bytearray(os.urandom(1) * (16 << 20)))
                    time.sleep(0.05)
            elif item == "chatter":
                while True:
                    emit.begin(index)
                    time.sleep(0.05)
            elif item == "fork bomb":
                emit.begin(index)
                try:
                    os.fork()
                    emit.done(index, "forked")
                except PermissionError:
                    emit.done(index, "refused")
            elif item == "raises":
                emit.begin(index)
                raise RuntimeError("as the judge would")
            elif item == "half a message":
                emit.begin(index)
                os.write(pipe.fileno(), (100).to_bytes(4, "big") + b'["done"')
                time.sleep(60)
            elif item in ("pickle", "no json", "other index", "not asked", "long"):
                emit.begin(index)
                if item == "pickle":
                    pipe.send_bytes(pickle.dumps(_Unpickled(os.path.join(folder, "unpickled"))))
                elif item == "no json":
                    pipe.send_bytes(b"\x80\x04.")
                elif item == "other index":
                    pipe.send_bytes(b'["done", 77, 1]')
                elif item == "not asked":
                    pipe.send_bytes(b'["done", 0, {"a": 1}]')
                else:
                    pipe.send_bytes(b" " * (17 << 20))
                time.sleep(30)
            else:
                double([(index, item)], emit)

    return handler


def greedy(how, folder):
    """Sends a sign of life again and again, as strangers' threads can, and fills the host meanwhile."""

    def handler(items, emit):
        held = []
        if how == "memory":
            held.append(b"x" * (200 << 20))
        elif how == "file in memory":
            held.append(os.memfd_create("x"))
            os.write(held[0], b"x" * (200 << 20))
        elif how == "disk":
            os.mkdir(f"{folder}/in")
            with open(f"{folder}/in/file", "wb") as file:
                file.write(bytes(3 << 20))
        else:
            for number in range(101):
                os.symlink("/", f"{folder}/{number}")
        while True:
            emit.begin(items[0][0])

    return handler
