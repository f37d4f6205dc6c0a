"""Break the code in many small ways, and see whether the tests notice.

    python tools/mutate.py --work build/mutation --jobs 8

A seeded sample of mutants (cosmic-ray's operators, extra `mutation`) of the files in `mutation/mutant_list.py` is
written to a plan. Each is run with the tests that run its lines, in a copy of the tree; the checkout stays as it is.
Every result is on disk before the next mutant begins: the same command goes on after a kill. The report is printed, and
written to `report.json` and `report.txt` in the work folder.

The same command takes other options::

    python tools/mutate.py --work build/areas --area lab/jail judge    # folders of the package
    python tools/mutate.py --work build/mutation --again survivors     # after tests were added
    python tools/mutate.py --work build/mutation --gpu                 # GPU tests of the survivors
    python tools/mutate.py --work build/mutation --report              # after mutation/equivalent.json was edited

Exit status: 0 when every mutant of this command has a result, 2 on an error.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for _folder in (ROOT / "src", ROOT / "lab" / "src", ROOT / "tools"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

from mutation.covering_tests import Suite, measure  # noqa: E402
from mutation.mutant_list import PLAN, Mutant, Plan, areas_of, draw, files_of, read_plan, write_plan  # noqa: E402
from mutation.mutant_report import EQUIVALENT, read_equivalent, report, report_text, survivors_of  # noqa: E402
from mutation.mutant_runs import MutantResult, Runs, compile_tree, copy_tree, read_results  # noqa: E402

from outblas.core.errors import OutblasError, UsageError  # noqa: E402
from outblas.core.files import lock_folder, write_atomic, write_json  # noqa: E402


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--work", type=Path, required=True, help="folder for plan, copies of the tree, results and report")
    add("--mutants", type=int, default=400, help="size of the sample (default: 400)")
    add("--seed", type=int, default=0, help="of the draw (default: 0)")
    add("--area", nargs="+", action="extend", default=[], help="areas of mutant_list.py, or folders such as jail")
    add("--jobs", type=int, default=1, help="mutants run side by side (default: 1)")
    add("--shards", type=int, default=1, help="parts of the plan, for several commands (default: 1)")
    add("--shard", type=int, default=0, help="which part this command runs, from 0 (default: 0)")
    add("--most-seconds", type=float, default=600.0, help="longest set of tests of a mutant, by its clean time")
    add("--tests", nargs="+", default=None, help="folders or files of tests (default: all)")
    add("--gpu", action="store_true", help="run the survivors with the tests marked gpu, one at a time")
    add("--only", nargs="+", default=(), metavar="FILE|ID", help="run these again: files or ids of mutants")
    add("--again", choices=("survivors",), help="run these again")
    add("--prepare", action="store_true", help="write the plan and see which tests run which lines; run no mutant")
    add("--report", action="store_true", help="only write and print the report")
    options = parser.parse_args(argv)
    if min(options.mutants, options.jobs, options.shards) < 1 or not 0 <= options.shard < options.shards:
        parser.error("--mutants, --jobs and --shards are 1 or more, --shard is from 0 and below --shards")
    return options


def _suite(options: argparse.Namespace) -> Suite:
    if options.gpu:
        return Suite("gpu", tuple(options.tests or ("tests/gpu", "tests/adversarial")), "gpu")
    return Suite("cpu", tuple(options.tests or ("tests",)), "not gpu", without="tests/gpu")


def _plan(options: argparse.Namespace) -> Plan:
    if not (options.work / PLAN).exists():
        if options.report:
            raise UsageError(f"{options.work} has no plan", "the folder of a run", "choose another --work")
        print("drawing the plan", flush=True)
        files = files_of(ROOT, areas_of(options.area))
        write_plan(options.work, draw(ROOT, options.mutants, options.seed, files))
    plan = read_plan(options.work, ROOT)
    asked = {"seed": options.seed, "asked": options.mutants, "areas": sorted(areas_of(options.area))}
    have = {name: plan.about[name] for name in asked}
    if asked != have and not options.report:
        raise UsageError(f"the plan in {options.work} is of {have}", f"a plan of {asked}", "choose another --work")
    return plan


def _due(options: argparse.Namespace, plan: Plan, suite: Suite) -> list[Mutant]:
    """Return what this command runs: its part of the plan without what has a result, or what it was asked to repeat."""
    results = read_results(options.work)
    mine = [m for index, m in enumerate(plan.mutants) if index % options.shards == options.shard]
    if options.gpu or options.again:
        alive = {mutant.id for mutant in survivors_of(plan, results, "cpu")}
        mine = [mutant for mutant in mine if mutant.id in alive]
    if options.only:
        chosen = [m for m in mine if m.id in options.only or m.file in options.only]
        if not chosen:
            raise UsageError(f"no mutant is {' or '.join(options.only)}", "files or ids of the plan", "mend --only")
        return chosen
    return mine if options.again else [m for m in mine if (m.id, suite.name) not in results]


def _run(options: argparse.Namespace, plan: Plan, suite: Suite, part: Path) -> None:
    due = _due(options, plan, suite)
    if not due and not options.prepare:
        return
    jobs = 1 if options.gpu else options.jobs
    with lock_folder(options.work / "clean"):
        clean = copy_tree(ROOT, options.work / "clean" / "tree", options.work)
        compile_tree(clean)
        covered = measure(clean, options.work, suite, plan.about["files"], jobs)
        if options.prepare:
            return
        trees = [copy_tree(clean, part / f"tree{index}") for index in range(min(jobs, len(due)))]
    unused = sorted(test for test, said in covered.tests.items() if said["outcome"] == "failed")
    print(f"{len(covered.tests)} tests; not used, for they fail without a mutant: {', '.join(unused) or 'none'}")
    done = 0

    def say(result: MutantResult) -> None:
        nonlocal done
        done += 1
        by = f" by {result.by}" if result.by else f" ({result.tests} tests)"
        print(f"{done}/{len(due)} {result.id}: {result.outcome}{by}, {result.seconds:.1f} s", flush=True)

    results = options.work / f"results-{options.shard}of{options.shards}.jsonl"
    Runs(suite, covered, results, options.most_seconds).run(due, trees, say)


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run the mutants that are due, write and print the report; return the exit status."""
    options = _arguments(argv)
    options.work = options.work.resolve()
    part = options.work / f"part-{options.shard}of{options.shards}"
    try:
        with ExitStack() as stack:
            if not options.report:
                stack.enter_context(lock_folder(part))
            plan, suite = _plan(options), _suite(options)
            equivalent = read_equivalent(EQUIVALENT)
            if not options.report:
                _run(options, plan, suite, part)
            found = report(plan, read_results(options.work), equivalent)
            write_json(options.work / "report.json", found)
            write_atomic(options.work / "report.txt", report_text(found).encode())
            print(report_text(found), end="")
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    except OutblasError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupted)
    sys.exit(main())
