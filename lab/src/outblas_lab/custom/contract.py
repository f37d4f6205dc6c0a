"""The launch block of a free kernel: how the kernel is launched. It is parsed strictly."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outblas.core.errors import ContractError
from outblas.core.problem import ELEMENT_BYTES, ROW_ALIGN_BYTES, Problem
from outblas.core.roofline import Gpu
from outblas_lab.custom.cuda_text import comments
from outblas_lab.custom.expression import Expression, variables_of

LAUNCH_MARK = "outblas-launch"
#: Maximum workspace, bytes; baselines get the same (docs/develop/architecture.md).
MAX_WORKSPACE_BYTES = 32 << 20
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)
_MAX_THREADS, _MAX_CLUSTER, _MAX_SHARED, _MAX_BOX = 1024, 16, 232448, 256
_DO = "correct the launch block (docs/judge/free-kernels.md)"

Form = Literal["device", "host"]
Size = Union[int, str]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Map(_Strict):
    operand: Literal["A", "B", "C"]
    box: Annotated[list[int], Field(min_length=2, max_length=2)]
    swizzle: Literal[0, 32, 64, 128] = 0


class _Common(_Strict):
    acc: Literal["fp32", "fp16"]
    uses: list[Literal["cutlass"]] = []
    requires: Annotated[list[str], Field(max_length=16)] = []


class _Device(_Common):
    form: Literal["device"]
    entry: str
    grid: Annotated[list[Size], Field(min_length=3, max_length=3)]
    block: Annotated[list[int], Field(min_length=3, max_length=3)]
    cluster: Annotated[list[int], Field(min_length=3, max_length=3)] = [1, 1, 1]
    shared: int = 0
    workspace: Size = 0
    tensor_maps: Annotated[list[_Map], Field(max_length=8)] = []


class _Host(_Common):
    form: Literal["host"]


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor that a kernel takes as a parameter. The constructor checks nothing; :func:`read_launch` does.

    Attributes:
        box: (rows, columns) of a box, elements.
        swizzle: swizzle span, bytes: 32, 64 or 128; 0: none.
    """

    operand: str
    box: tuple[int, int]
    swizzle: int

    def extents(self, problem: Problem) -> tuple[int, int]:
        """Return (rows, columns) of the stored matrix, elements.

        ``A`` is (M, K) and ``C`` is (M, N). ``B`` is (N, K) for layout ``TN`` and (K, N) for ``NN``.
        """
        return {"A": (problem.m, problem.k), "B": problem.b_shape, "C": (problem.m, problem.n)}[self.operand]


@dataclass(frozen=True)
class LaunchBlock:
    """A parsed launch block; :func:`read_launch` makes it. The fields from ``grid`` on are for form ``device`` only.

    Attributes:
        form: ``device``: a kernel that is launched as described here. ``host``: a function that launches by itself.
        acc: accumulator that the kernel claims, ``fp32`` or ``fp16``.
        entry: name of the kernel; ``outblas_launch`` for form ``host``.
        uses: ``("cutlass",)`` or empty.
        requires: conditions that a problem must meet; each is met if its value is not 0.
        grid: CTAs along x, y and z; empty for form ``host``.
        block: threads along x, y and z.
        cluster: CTAs of a cluster along x, y and z.
        shared: dynamic shared memory, bytes.
        workspace: global memory, bytes; zero only at the first call.
        tensor_maps: descriptors that follow the other parameters, in order.
    """

    form: Form
    acc: str
    entry: str
    uses: tuple[str, ...] = ()
    requires: tuple[Expression, ...] = ()
    grid: tuple[Expression, ...] = ()
    block: tuple[int, int, int] = (1, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared: int = 0
    workspace: Expression = Expression("0")
    tensor_maps: tuple[TensorMap, ...] = ()

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """Return why the kernel cannot run the problem on the GPU; None if it can.

        An expression without a value is a reason, too; no error is raised. Example: an unmet condition gives
        ``it requires K % 8 == 0``. For form ``host``, only accumulator and conditions count.
        """
        if self.acc != problem.acc:
            return f"the kernel accumulates in {self.acc}, but the problem requires {problem.acc}"
        try:
            names = variables_of(problem.m, problem.n, problem.k, gpu.sms)
            unmet = next((each for each in self.requires if not each.value(names)), None)
            if unmet is not None:
                return f"it requires {unmet}"
            return self._no_launch(problem, gpu) if self.form == "device" else None
        except ContractError as error:
            return error.wrong

    def grid_of(self, problem: Problem, gpu: Gpu) -> tuple[int, int, int]:
        """Return the CTAs along x, y and z; :meth:`why_not` checks them against a GPU's limits.

        Raises:
            ContractError: an expression has no value, e.g. it divides by zero.
            ValueError: the form is ``host``, which has no grid.
        """
        names = variables_of(problem.m, problem.n, problem.k, gpu.sms)
        x, y, z = (each.value(names) for each in self.grid)
        return x, y, z

    def workspace_of(self, problem: Problem, gpu: Gpu) -> int:
        """Return the size of the workspace, bytes; 0 for form ``host``. It is not checked against a limit.

        Raises:
            ContractError: the expression has no value, e.g. it divides by zero.
        """
        return self.workspace.value(variables_of(problem.m, problem.n, problem.k, gpu.sms))

    def canonical(self) -> str:
        """Return JSON with sorted keys, all defaults and no spaces after separators. Equal texts mean equal launches.

        For form ``host`` it has only ``acc``, ``form``, ``requires`` and ``uses``, e.g.
        ``{"acc":"fp32","form":"host","requires":[],"uses":[]}``.
        """
        data: dict[str, Any] = {"form": self.form, "acc": self.acc, "uses": sorted(set(self.uses))}
        data["requires"] = [str(each) for each in self.requires]
        if self.form == "device":
            data |= {
                "entry": self.entry,
                "grid": [str(each) for each in self.grid],
                "block": self.block,
                "cluster": self.cluster,
                "shared": self.shared,
                "workspace": str(self.workspace),
                "tensor_maps": [vars(each) for each in self.tensor_maps],
            }
        return json.dumps(data, sort_keys=True, separators=(",", ":"))

    def _no_launch(self, problem: Problem, gpu: Gpu) -> str | None:
        """Return why the GPU cannot make the launch; None if it can."""
        ctas = self.grid_of(problem, gpu)
        if any(not 1 <= count <= most for count, most in zip(ctas, _MAX_GRID, strict=True)):
            return f"a grid of {ctas} CTAs is out of range"
        if any(count % size for count, size in zip(ctas, self.cluster, strict=True)):
            return f"a grid of {ctas} CTAs is not a multiple of cluster {self.cluster}"
        if not 0 <= self.workspace_of(problem, gpu) <= MAX_WORKSPACE_BYTES:
            return f"a workspace of {self.workspace_of(problem, gpu)} bytes is not within 0 to {MAX_WORKSPACE_BYTES}"
        if self.shared > gpu.smem_optin:
            return f"it needs {self.shared} bytes of dynamic shared memory, but the GPU has {gpu.smem_optin}"
        for each in self.tensor_maps:
            if each.extents(problem)[1] * ELEMENT_BYTES % ROW_ALIGN_BYTES:
                return f"rows of {each.operand} are not a multiple of {ROW_ALIGN_BYTES} bytes, as TMA requires"
        return None


def read_launch(text: str) -> LaunchBlock:
    """Return the launch block of a text: the JSON object in its only comment ``/* outblas-launch {...} */``.

    Line comments do not count. Form ``host`` has the keys ``form``, ``acc``, ``uses`` and ``requires``. Form ``device``
    also has ``entry``, ``grid``, ``block``, ``cluster``, ``shared``, ``workspace`` and ``tensor_maps``. Required are
    ``form`` and ``acc``, and for ``device`` also ``entry``, ``grid`` and ``block``.

    Raises:
        ContractError: no launch block or several; no JSON; or invalid content, e.g. an unknown key.
    """
    blocks = [each.strip() for each in comments(text) if each.strip().startswith(LAUNCH_MARK)]
    if len(blocks) != 1:
        raise ContractError(f"found {len(blocks)} launch blocks", f"one comment /* {LAUNCH_MARK} {{...}} */", _DO)
    try:
        data = json.loads(blocks[0][len(LAUNCH_MARK) :], object_pairs_hook=_no_doubles, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ContractError(f"the launch block is not JSON ({str(error)[:120]})", "one JSON object", _DO) from error
    if not isinstance(data, dict) or data.get("form") not in ("device", "host"):
        raise ContractError("the launch block has no valid form", '"form": "device" or "host"', _DO)
    try:
        if data["form"] == "host":
            host = _Host.model_validate(data)
            return LaunchBlock("host", host.acc, "outblas_launch", tuple(sorted(set(host.uses))), _all(host.requires))
        return _device(_Device.model_validate(data))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ContractError(f"launch block, key {where}: {first['msg'].lower()}", "the contract's keys", _DO) from None


def _device(block: _Device) -> LaunchBlock:
    """Return the launch block of form ``device``. Raises ContractError for a size out of range."""
    if not re.fullmatch(r"[A-Za-z_]\w{0,127}", block.entry):
        raise ContractError(f"entry is {block.entry[:40]!r}", 'the name of an extern "C" __global__ function', _DO)
    x, y, z = block.block
    _within("block", (x, y, z), _MAX_BLOCK, x * y * z, _MAX_THREADS)
    cx, cy, cz = block.cluster
    _within("cluster", (cx, cy, cz), (_MAX_CLUSTER,) * 3, cx * cy * cz, _MAX_CLUSTER)
    if not 0 <= block.shared <= _MAX_SHARED:
        raise ContractError(f"shared is {block.shared} bytes", f"0 to {_MAX_SHARED}", _DO)
    return LaunchBlock(
        "device", block.acc, block.entry, tuple(sorted(set(block.uses))), _all(block.requires),
        tuple(Expression.parse(each) for each in block.grid), (x, y, z), (cx, cy, cz), block.shared,
        Expression.parse(block.workspace), tuple(_tensor_map(each) for each in block.tensor_maps),
    )  # fmt: skip


def _tensor_map(block: _Map) -> TensorMap:
    """Return a descriptor. Raises ContractError for a box that TMA cannot have."""
    rows, columns = block.box
    row_bytes = columns * ELEMENT_BYTES
    if not (1 <= rows <= _MAX_BOX and 1 <= columns <= _MAX_BOX) or row_bytes % ROW_ALIGN_BYTES:
        raise ContractError(f"box is {block.box}", f"1 to {_MAX_BOX} per side, row bytes a multiple of 16", _DO)
    if block.swizzle and row_bytes > block.swizzle:
        raise ContractError(f"{row_bytes}-byte rows exceed swizzle {block.swizzle}", f"{block.swizzle} or less", _DO)
    return TensorMap(block.operand, (rows, columns), block.swizzle)


def _within(what: str, sizes: tuple[int, ...], most: tuple[int, ...], product: int, product_most: int) -> None:
    """Raise ContractError if a size is out of 1..most or the product exceeds ``product_most``."""
    if any(not 1 <= size <= top for size, top in zip(sizes, most, strict=True)) or product > product_most:
        raise ContractError(f"{what} is {sizes}", f"1 to {most} per side, a product up to {product_most}", _DO)


def _all(texts: list[str]) -> tuple[Expression, ...]:
    return tuple(Expression.parse(each) for each in texts)


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dictionary. Raises ValueError for a repeated key."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
