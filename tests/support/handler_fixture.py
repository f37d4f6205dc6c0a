"""The worker's handler with everything below it replaced."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outblas.core.evaluation import Status, Timing, Verdict
from outblas.core.problem import Problem
from outblas.judge.bench_cell import Options
from outblas.judge.trials import TrialCache
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.workers import handler as ev
from support.gpus.known import H200

PROBLEM = Problem(64, 64, 64)
GOOD, SLOW, BAD = Sm90WgmmaConfig(64, 64), Sm90WgmmaConfig(64, 128), Sm90WgmmaConfig(64, 32)
PASSED = Verdict(Status.PASSED, ("static", "memory", "bound"), "", 0.5)


class Graph:
    freed = 0

    def __init__(self, name):
        self.name, self.executable = name, name

    def free(self):
        Graph.freed += 1


class Bench:
    repeats = 8

    def operands(self, index):
        return (None, None, None)

    def capture(self, kernel):
        return Graph(kernel)

    def measure(self, graphs, rounds, seed, warmup_seconds, benchmark_seconds, prune=None):
        figures = {name: 4.0 if name == "cublas" else 2.0 for name in graphs}
        return {name: Timing("offline", (us,) * rounds, us, 0.0) for name, us in figures.items()}


class Prover:
    after = PASSED

    def call(self, call):
        return call

    def graph(self, executable):
        return self.after

    def operands_intact(self):
        return True


class FakeBenchCell(ev.BenchCell):
    def __init__(self, problem, options, baselines, phase_timer):
        self.problem, self.bench, self.prover = problem, Bench(), Prover()
        self.graphs, self._entries, self._left_out = {"cublas": Graph("cublas")}, baselines, {"nvmmh": "none"}

    def close(self):
        pass


@pytest.fixture(name="handler")
def handler_fixture(monkeypatch):
    monkeypatch.setattr(ev, "BenchCell", FakeBenchCell)
    monkeypatch.setattr("outblas.kernels.legality.why_illegal", lambda p, c, g: None)
    monkeypatch.setattr("outblas.judge.faults.raise_if_context_lost", lambda error: error)
    made = ev.Handler(Options(0, H200, level="cell", rounds=3, baselines=("cublas",)))
    made.kernels = {}
    made._trials = TrialCache()

    def kernel(problem, config):
        found = made.kernels.get(config, PASSED)
        if isinstance(found, Exception):
            raise found
        return SimpleNamespace(bind=lambda *a: found), {"registers": 64.0}

    made._kernel = kernel
    return made


class Emit:
    def __init__(self):
        self.log, self.answers = [], {}

    def begin(self, index):
        self.log.append(index)

    def done(self, index, value):
        assert index not in self.answers
        self.answers[index] = value


def run(handler, *configs, problem=PROBLEM):
    emit = Emit()
    handler([(10 + i, ev.WorkItem(problem, c)) for i, c in enumerate(configs)], emit)
    assert sorted(emit.answers) == list(range(10, 10 + len(configs)))
    return [emit.answers[10 + i] for i in range(len(configs))], emit
