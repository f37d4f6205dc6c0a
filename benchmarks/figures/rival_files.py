"""Formats and means of the result files on rivals, for the benchmarks that write them and the pages that show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from outblas.core.errors import RecordError
from outblas.core.problem import Problem
from outblas.core.stats import geomean

ACCURACY_FORMAT = "outblas-torch-accuracy-3"
AMPERE_FORMAT = "outblas-ampere-peers-1"
CUDA_L2_FORMAT = "outblas-cuda-l2-1"
CUTLASS_FORMAT = "outblas-cutlass-1"
INDUCTOR_FORMAT = "outblas-inductor-rival-1"
LARGE_FORMAT = "outblas-large-products-1"
#: Name of a limit -> shared memory of a CTA, bytes: an A100's, and that of an A10, L40S or GeForce.
LIMITS = {"163": 163 * 1024, "99": 99 * 1024}


class Mean(NamedTuple):
    """A geometric mean of ratios of speed.

    Attributes:
        ratio: the mean; above 1 the first named is faster.
        ahead: problems on which the whole interval is above 1.
    """

    ratio: float
    problems: int
    ahead: int


def ampere_means(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, Mean]]:
    """Return (limit in KiB, accumulator, rival, mean of ours over the rival), where both were timed."""
    found = []
    for limit in LIMITS:
        for acc in ("fp32", "fp16"):
            of_acc = [row for row in rows if Problem.from_key(row["problem"]).acc == acc]
            for rival in ("cutlass", "cuda_l2"):
                ratios = [row["ratios"][limit][rival] for row in of_acc if rival in ratios_of(row).get(limit, {})]
                if ratios:
                    found.append((limit, acc, rival, _mean(ratios)))
    return found


def cuda_l2_groups(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Mean]]:
    """Return words on CUDA-L2's sums -> ``A_over_B`` -> mean of A over B on the GPU, where its kernel was timed."""
    timed = [row for row in rows if "ours_over_cuda_l2" in ratios_of(row)]
    groups = {
        "as claimed": [ratios_of(row) for row in timed if not has_other_sums(row["kernel"])],
        "others": [ratios_of(row) for row in timed if has_other_sums(row["kernel"])],
    }
    return {
        words: {
            pair: _mean([each[pair] for each in group if pair in each])
            for pair in dict.fromkeys(pair for each in group for pair in each)
        }
        for words, group in groups.items()
        if group
    }


def has_other_sums(kernel: Mapping[str, Any]) -> bool:
    """Return True if the machine code of CUDA-L2's kernel has another accumulator than its text claims."""
    return any(acc != kernel["claimed"] for acc in kernel["accumulators"])


def ratios_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ratios of a row; empty if its worker was lost."""
    found: Mapping[str, Any] = row.get("ratios", {})
    return found


def _mean(ratios: Sequence[Mapping[str, Any]]) -> Mean:
    return Mean(geomean(each["ratio"] for each in ratios), len(ratios), sum(each["low"] > 1.0 for each in ratios))


def cutlass_means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return geometric means over the problems on which an instance of CUTLASS passed.

    Returns:
        ``cutlass_over_baseline``, ``ours_over_baseline`` (a fallback counts as 1 in older files, and is timed in
        others) and ``ours_over_cutlass``.

    Raises:
        RecordError: CUTLASS passed on no problem.
    """
    both = [row for row in rows if row["cutlass"] is not None]
    if not both:
        wrong, do = "CUTLASS did not pass on any problem", "rerun benchmarks/cutlass_peer.py"
        raise RecordError(wrong, "at least one problem on which it passes", do)
    return {
        "cutlass_over_baseline": geomean(row["cutlass"]["ratio"] for row in both),
        "ours_over_baseline": geomean(row["ours"]["ratio"] if row["ours"] else 1.0 for row in both),
        "ours_over_cutlass": geomean(row["ours_over_cutlass"]["ratio"] for row in both),
    }
