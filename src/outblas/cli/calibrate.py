"""``outblas calibrate``: measure this machine's GPU for its record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outblas.cli import common
from outblas.cli.common import GpuOption, err, out


def calibrate(
    device: GpuOption = "cuda:0",
    out_file: Annotated[
        Path | None, typer.Option("--out", help="GPU record file to write (default: in ~/.local/share/outblas/gpus).")
    ] = None,
) -> None:
    """Measure this GPU's rates in under a minute and write them to its GPU record (needs a GPU).

    Roofline floors, regimes, the ranking model and the policy then use the measured rates instead of estimates.
    """
    index = common.gpu_index(device)

    from outblas.core.files import write_json
    from outblas.core.gpu_records import read_record, save_user_record
    from outblas.records.provenance import collect_provenance
    from outblas.runtime.device import forget_records
    from outblas.tune.calibrate import calibration

    if out_file is not None:
        common.output_file("--out", out_file, "GPU record", read_record)
    provenance = collect_provenance(common.command_line(), index)
    record = calibration.calibrate(index, provenance, lambda line: err.print(line, markup=False))
    path = save_user_record(record) if out_file is None else write_json(out_file, record.to_json())
    forget_records()
    if common.wants_json():
        from outblas.cli.documents import CalibrateDocument

        common.print_document(CalibrateDocument(gpu=record.gpu.name, path=str(path), record=record.to_json()))
    out.print(f"{record.title}: wrote {path}", markup=False)
    if record.estimated:
        out.print(f"still estimated: {', '.join(record.estimated)}", markup=False)
