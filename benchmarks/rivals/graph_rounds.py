"""CUDA graphs of calls, timed in interleaved rounds: for grouped_products.py and moe_layers.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from outblas.core.errors import unknown_name

#: Characters of an error's text that are kept.
_ERROR_CHARACTERS = 200


def run_all(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def graph_of(calls: Sequence[Callable[[], Any]]) -> Any:
    """Return a CUDA graph of calls, which have run once before."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run_all(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # If the end of a capture fails, torch.cuda.graph leaves its own stream current: the outer context undoes that.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, stream=stream):
        run_all(calls)
    return graph


def times_us(graphs: Mapping[str, Any], rounds: int, calls: int) -> dict[str, list[float]]:
    """Return microseconds of a call in each round; the graphs take turns, every second round the other way round."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for index in range(rounds + 1):
        names = list(graphs) if index % 2 else list(reversed(graphs))
        for name in names:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            if index:  # the first round warms up
                found[name].append(1e3 * begin.elapsed_time(end) / calls)
    return found


def why_absent(error: Exception) -> str:
    """Return an error in one line: its class and the first words of its text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_ERROR_CHARACTERS]}"


def chosen_names(text: str, known: Mapping[str, Any], kind: str) -> list[str]:
    """Return the names in a list with commas, the value of an option ``--<kind>s``.

    Raises:
        UsageError: a name is not known.
    """
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise unknown_name(kind, name, known, f"pass names of --{kind}s with commas")
    return names
