"""Time sm80_gemv_mma on the linear layers of Llama 3, on a GPU: which knobs, how near to the bandwidth of HBM.

    python scripts/probe_gemv.py --out probe_gemv.jsonl

For every (M, layer): all legal configs of the family's pool with and without PDL, beside torch and the
model's first eight of the other families. Each result is checked against torch; each time is the median of a
few interleaved rounds of a CUDA graph of back-to-back calls that rotate over 200 MB of operands
(outblas.timing). A problem is one JSON line, {"p", "first", "med": {config: us}, ...}, which
scripts/fit_model.py reads too; problems that the file has already are not run again, and after --seconds no
further one is begun.

    python scripts/probe_gemv.py --walk --seconds 200 --out probe_walk.jsonl

tells CTAs that walk over tiles from those with one tile each, on weights of 29 to 940 MB and M = 1, 8, 16: with the
launch options off, and all of them on (PDL, and the first weights before the predecessor has ended), L2 told and not
told that weights are read once. A line for the best of each kind.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

from outblas.baselines import TorchMm
from outblas.compile import compile_many
from outblas.config import KernelConfig, config_name
from outblas.cubin import Cubin
from outblas.errors import OutblasError
from outblas.kernels.catalogue import candidates
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.legality import why_illegal
from outblas.launch import LoadedKernel, load
from outblas.model import rank
from outblas.problem import Problem
from outblas.provenance import collect
from outblas.source import Source, kernel_kind, make_source
from outblas.suites import LLM_LAYERS
from outblas.timing import Bench

TOKENS = (1, 8, 16, 4, 2)
LAYERS = LLM_LAYERS["llama3-8b"] + LLM_LAYERS["llama3-70b"]
#: K behind the ring that is brought into L2 before the predecessor has ended: of 16 rows, 64 KB.
WARM = 2048
#: N, K of --walk, the numbers of tokens, and kernels with one tile per CTA to compare with, by the model.
WALK_LAYERS = ((28672, 4096), (10240, 8192), (8192, 8192), (7168, 2048), (57344, 8192))
WALK_TOKENS, STILL = (1, 8, 16), 12
#: Datasheet bandwidth of an H200's memory, bytes per microsecond.
PEAK = 4.8e6
#: Kernels of the other families to compare with, by the model.
OTHERS = 8
#: Largest difference to torch, relative to the largest output: either rounds once and sums in another order.
TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2}
FAMILY = Sm80GemvConfig.family


def main() -> int:
    options = _arguments()
    tokens, layers = (WALK_TOKENS, WALK_LAYERS) if options.walk else (TOKENS, LAYERS)
    problems = [Problem(m, n, k, options.layout, options.dtype) for m in tokens for n, k in layers]
    done = _done(options.out)
    left = [p for p in problems if p.key not in done]
    print(f"{len(problems) - len(left)} of {len(problems)} problems are in {options.out}", flush=True)
    offered = {p: _walk_offered(p) if options.walk else _offered(p) for p in left}
    begin = perf_counter()
    cubins = _compiled([(p, c) for p in left for c in offered[p]])
    print(f"{len(cubins)} kernels compiled in {perf_counter() - begin:.1f} s", flush=True)
    provenance = collect("scripts/probe_gemv.py")
    begin, wrong = perf_counter(), 0
    loaded: dict[Any, LoadedKernel] = {}
    for problem in left:
        if perf_counter() - begin > options.seconds:
            print(f"{options.seconds} s are over: run the same command again for the rest")
            break
        row = probe(problem, {c: _kernel(problem, c, cubins, loaded) for c in offered[problem]}, options.rounds)
        wrong += len(row["wrong"])
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "provenance": provenance}) + "\n")
        _print(problem, row, _walk_bests if options.walk else _bests)
    print(f"{wrong} wrong results, {perf_counter() - begin:.1f} s")
    return 1 if wrong else 0


def probe(problem: Problem, kernels: dict[KernelConfig, LoadedKernel], rounds: int) -> dict[str, Any]:
    """Check and time the kernels and torch on one problem: the JSON line, without provenance."""
    entries: dict[str, Any] = {"torch": TorchMm()}
    wrong: dict[str, str] = {}
    with Bench(problem) as bench:
        wanted = _product(bench)
        for config, kernel in kernels.items():
            name = config_name(config)
            try:
                trouble = _trouble(bench, kernel, wanted)
            except OutblasError as error:
                trouble = str(error)
            if trouble:
                wrong[name] = trouble
            else:
                entries[name] = kernel
        timings = bench.quick(entries, rounds)
    times = {name: round(timing.median_us, 3) for name, timing in timings.items()}
    return {"p": problem.key, "first": {}, "med": times, "bytes": problem.bytes, "wrong": wrong}


def _product(bench: Bench) -> Any:
    """torch's product of the bench's first operands, fp32."""
    import torch

    a, b, _ = bench.operands(0)
    torch.cuda.synchronize()
    right = b.t() if bench.problem.layout == "TN" else b
    found = torch.mm(a, right).float()
    torch.cuda.synchronize()
    return found


def _trouble(bench: Bench, kernel: LoadedKernel, wanted: Any) -> str:
    """What is wrong with one call's result; empty when nothing is."""
    import torch

    a, b, c = bench.operands(0)
    c.fill_(float("nan"))
    torch.cuda.synchronize()
    kernel.bind(bench.problem, a, b, c)(bench.stream)
    bench.synchronize()
    error = float((c.float() - wanted).abs().max() / wanted.abs().max())
    limit = TOLERANCE[bench.problem.dtype]
    return "" if error <= limit else f"off by {error:.3g} of the largest output, more than {limit}"


def _offered(problem: Problem) -> list[KernelConfig]:
    """The family's configs, and the model's first of the others for each PDL option."""
    legal = candidates(problem)
    found = [c for c in legal if c.family == FAMILY]
    for pdl in (False, True):
        others = [c for c in legal if c.family != FAMILY and c.pdl == pdl]
        found += [others[int(i)] for i in rank(problem, others)[:OTHERS]]
    return found


def _walk_offered(problem: Problem) -> list[KernelConfig]:
    """The walking kernels, their twins with one tile, the best of the family by the model; plain, early, warm; l2."""
    family = [c for c in candidates(problem) if isinstance(c, Sm80GemvConfig) and not c.pdl]
    still = [c for c in family if not c.persistent]
    walks = [c for c in family if c.persistent]
    alike = [replace(c, persistent=False, kept_k=0) for c in walks]
    chosen = dict.fromkeys([*walks, *alike, *(still[int(i)] for i in rank(problem, still)[:STILL])])
    launches = [replace(c, pdl=early, early=early) for c in chosen for early in (False, True)]
    launches += [replace(c, warm_k=WARM) for c in launches if c.early]
    found = [replace(c, l2=l2) for c in launches for l2 in ("plain", "stream_b")]  # type: ignore[arg-type]
    return [c for c in found if why_illegal(problem, c) is None]


def _compiled(pairs: Sequence[tuple[Problem, KernelConfig]]) -> dict[Any, Cubin]:
    """Kernel kind -> cubin; raises what the compiler said of the first that it refuses."""
    kinds: dict[Any, Source] = {}
    for problem, config in pairs:
        kinds.setdefault(kernel_kind(problem, config), make_source(problem, config))
    names, found = list(kinds), {}
    for index, result in compile_many(list(kinds.values())):
        if not isinstance(result, Cubin):
            raise result
        found[names[index]] = result
    return found


def _kernel(
    problem: Problem, config: KernelConfig, cubins: dict[Any, Cubin], loaded: dict[Any, LoadedKernel]
) -> LoadedKernel:
    kind = kernel_kind(problem, config)
    if kind not in loaded:
        loaded[kind] = load(cubins[kind], config)
    return loaded[kind]


def _print(
    problem: Problem, row: dict[str, Any], bests: Callable[[dict[str, float]], Iterator[tuple[str, str]]]
) -> None:
    times = row["med"]
    print(f"{problem.key}  torch {times['torch']:.2f} us")
    for label, name in bests(times):
        us = times[name]
        rate = row["bytes"] / us
        print(f"  {label:16} {us:8.2f} us  {rate / 1e3:5.0f} GB/s  {rate / PEAK:6.1%} of {PEAK / 1e6} TB/s  "
              f"{times['torch'] / us:5.2f} x torch  {name}")  # fmt: skip
    for name, why in row["wrong"].items():
        print(f"  WRONG {name}: {why}")
    sys.stdout.flush()


def _bests(times: dict[str, float]) -> Iterator[tuple[str, str]]:
    for pdl in ("false", "true"):
        for label, own in (("gemv", True), ("others", False)):
            names = [n for n in times if f",pdl={pdl}" in n and n.startswith(FAMILY) == own]
            if names:
                yield label + (" pdl" if pdl == "true" else ""), min(names, key=lambda n: times[n])


def _walk_bests(times: dict[str, float]) -> Iterator[tuple[str, str]]:
    for launch, walk, hint in product(("plain", "early", "warm"), (False, True), (False, True)):
        kind = {
            ",early=true": launch != "plain",
            ",warm_k=": launch == "warm",
            ",persistent=true": walk,
            ",l2=stream_b": hint,
        }
        names = [n for n in times if n.startswith(FAMILY) and all((text in n) == on for text, on in kind.items())]
        if names:
            label = f"{launch} {'walk' if walk else 'still'}{' l2' if hint else ''}"
            yield label, min(names, key=lambda n: times[n])


def _done(path: Path) -> set[str]:
    """Problems that the file has; a last line cut off by a kill counts as not there, and is closed."""
    if not path.exists():
        return set()
    text = path.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        path.write_text(text, encoding="utf-8")
    return {json.loads(line)["p"] for line in text.splitlines()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("probe_gemv.jsonl"))
    parser.add_argument("--layout", choices=("TN", "NN"), default="TN")
    parser.add_argument("--dtype", choices=("fp16", "bf16"), default="fp16")
    parser.add_argument("--walk", action="store_true", help="CTAs that walk over tiles against those with one tile")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds per problem (default 3)")
    parser.add_argument("--seconds", type=float, default=80.0, help="begin no further problem after so long")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
