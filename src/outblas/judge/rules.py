"""Gate 6: a call computes its product and does nothing else.

It runs on the given stream and in that stream's order, under graph capture, and on two streams at once. It does not
wait, allocate, start threads, use other streams, keep state or change the L2's policy. A kernel with early loads of B
(knob ``early``) obeys the same rules, but queued work must not write its B.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outblas.core.evaluation import GateFailed, Status
from outblas.core.problem import Problem
from outblas.judge.operands import equal_bits, torch_dtype
from outblas.judge.proof_context import ProofContext, process_state
from outblas.kernels.legality import why_illegal
from outblas.runtime.device import gpu_of_device
from outblas.runtime.driver import capture_graph, check, driver

#: Lengths of plugs in GPU cycles: a quarter of a millisecond, longer than a launch takes the host; longer ones where it
#: was held up. In front of eight launches on two streams: half a millisecond.
_PLUG_CYCLES, _PLUG_OF_TWO = (500_000, 10_000_000, 40_000_000), 1_000_000
#: Looks at free memory. A process beside this one that goes on allocating looks like the candidate in a few of them.
_LOOKS_AT_MEMORY = 10


def check_rules(context: ProofContext) -> None:
    """Check all of gate ``rules``; return None if the candidate keeps them.

    Args:
        context: the proof of a candidate that has passed the earlier gates, on a GPU.

    Raises:
        GateFailed: RULE_BROKEN; WRONG if two calls on two streams at once give other bits; MEMORY_VIOLATION if a call
            writes elsewhere.
        DeviceError: the candidate faults.
    """
    first, second = (context.normal(seed) for seed in (11, 12))
    expected = (context.run(*first, index=0), context.run(*second, index=1))
    _no_side_effects(context)
    _stream_order(context, first, expected[0])
    _capture(context, first, second, expected[0])
    _two_streams(context, first, second, expected)
    _chain(context)


def _no_side_effects(context: ProofContext) -> None:
    """Fail on an allocation, a new thread or a change of the L2 policy.

    The driver starts threads at first use, so native threads are compared between warmed-up calls. Everything else is
    compared with the process before the candidate was bound.
    """
    import torch

    cu = driver()

    def allocated() -> int:
        return int(torch.cuda.memory_stats_as_nested_dict(context.device)["allocation"]["all"]["allocated"])

    for what, count in process_state().items():
        # Fewer threads is no offence: one of an earlier step may have ended meanwhile.
        if count > context.before[what] or (count != context.before[what] and "thread" not in what):
            raise _broken(f"it {what} ({context.before[what]} -> {count})")
    tensors, threads, free = allocated(), _threads(), torch.cuda.mem_get_info(context.device)[0]
    for _ in range(4):
        context.calls[0](context.stream)
    context.wait()
    if allocated() > tensors:
        raise _broken(f"a call allocates torch memory ({allocated() - tensors} tensors in 4 calls)")
    if _threads() > threads:
        raise _broken(f"a call starts threads ({threads} -> {_threads()})")
    _no_device_memory(context, free)
    attribute = cu.CUstreamAttrID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    window = check("cuStreamGetAttribute", cu.cuStreamGetAttribute(context.stream, attribute)).accessPolicyWindow
    if window.num_bytes:
        raise _broken("it set an access policy window on the stream")


def _no_device_memory(context: ProofContext, free: int) -> None:
    """Free memory must not shrink with every four calls. Other processes may use the GPU, hence several looks."""
    import torch

    for _ in range(_LOOKS_AT_MEMORY):
        now = torch.cuda.mem_get_info(context.device)[0]
        if now >= free:
            return
        lost, free = free - now, now
        for _ in range(4):
            context.calls[0](context.stream)
        context.wait()
    raise _broken(f"every four calls reduce free GPU memory (last by {lost} bytes)")


def _stream_order(context: ProofContext, inputs: tuple[Any, Any], expected: Any) -> None:
    """Delay the inputs behind a plug and copy C right after the call; fail if the call waits or reads too early.

    Only A is late if B is promised to be constant. The call gets several tries at not waiting, because the host itself
    may have been held up as long as the plug.
    """
    for cycles in _PLUG_CYCLES:
        out, waited = _behind_a_plug(context, inputs, cycles)
        if not equal_bits(out, expected):
            raise _broken("it does not respect the order of the given stream")
        if not waited:
            return
    raise _broken("the call waits for the GPU")


def _behind_a_plug(context: ProofContext, inputs: tuple[Any, Any], cycles: int) -> tuple[Any, bool]:
    """(C as the next work on the stream sees it, whether the plug had ended when the call returned)."""
    import torch

    a, b, c = context.data[0]
    staged = [t.clone() for t in inputs]
    out = torch.empty_like(c)
    plug = torch.cuda.Event()
    constant = _needs_constant_weights(context)
    context.data.set_inputs(
        0, torch.full_like(a, float("nan")), staged[1] if constant else torch.full_like(b, float("nan"))
    )
    context.wait()
    with torch.cuda.stream(context.torch_stream):
        torch.cuda._sleep(cycles)
        plug.record()
        a.copy_(staged[0])
        if not constant:
            b.copy_(staged[1])
        context.calls[0](context.stream)
        waited = plug.query()
        out.copy_(c)
    context.wait()
    return out, waited


def _capture(context: ProofContext, first: tuple[Any, Any], second: tuple[Any, Any], expected: Any) -> None:
    """Under capture: one chain of kernels, which computes again whenever it is launched."""
    from outblas.core.errors import OutblasError

    cu = driver()
    try:
        graph = capture_graph([context.calls[0]], context.stream)
    except (OutblasError, RuntimeError) as error:
        raise _broken(f"it cannot be captured in a CUDA graph ({error})") from error
    executable = None
    try:
        check_nodes(graph)
        executable = check("cuGraphInstantiate", cu.cuGraphInstantiate(graph, 0))
        for inputs in (second, first):
            context.data.set_inputs(0, *inputs)
            context.wait()
            check("cuGraphLaunch", cu.cuGraphLaunch(executable, context.stream))
            context.wait()
    finally:
        if executable is not None:
            cu.cuGraphExecDestroy(executable)
        cu.cuGraphDestroy(graph)
    if not equal_bits(context.data[0][2], expected):
        raise _broken("its captured graph does not compute the product")


def check_nodes(graph: Any) -> None:
    """Check the nodes of a captured call: kernels and memsets on one stream, without an L2 policy.

    Raises:
        GateFailed: RULE_BROKEN.
    """
    cu = driver()
    kinds = cu.CUgraphNodeType
    allowed = (int(kinds.CU_GRAPH_NODE_TYPE_KERNEL), int(kinds.CU_GRAPH_NODE_TYPE_MEMSET))
    _, count = check("cuGraphGetNodes", cu.cuGraphGetNodes(graph))
    if count == 0:
        raise _broken("it enqueues nothing on the given stream")
    nodes, _ = check("cuGraphGetNodes", cu.cuGraphGetNodes(graph, count))
    policy = cu.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    for node in nodes:
        kind = check("cuGraphNodeGetType", cu.cuGraphNodeGetType(node))
        if int(kind) not in allowed:
            raise _broken(f"its graph contains a node of type {kind.name}")
        if int(kind) == allowed[0]:
            value = check("cuGraphKernelNodeGetAttribute", cu.cuGraphKernelNodeGetAttribute(node, policy))
            if value.accessPolicyWindow.num_bytes:
                raise _broken("a kernel sets an access policy window (persisting L2)")
    _, roots = check("cuGraphGetRootNodes", cu.cuGraphGetRootNodes(graph))
    if roots != 1:
        raise _broken(f"its graph has {roots} root nodes: it uses more than one stream")


def _two_streams(context: ProofContext, first: Any, second: Any, expected: tuple[Any, Any]) -> None:
    """Both calls at once, released by plugs of equal length, several times in turn."""
    import torch

    other = torch.cuda.Stream(context.device)
    for _ in range(3):
        context.data.set_inputs(0, *first)
        context.data.set_inputs(1, *second)
        context.wait()
        for stream in (context.torch_stream, other):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(_PLUG_OF_TWO)
        for _ in range(4):
            context.calls[0](context.stream)
            context.calls[1](other.cuda_stream)
        context.wait()
        for index in range(2):
            if not equal_bits(context.data[index][2], expected[index]):
                raise GateFailed(Status.WRONG, "results differ when two calls run concurrently on two streams")


def _chain(context: ProofContext) -> None:
    """Multiply products of products, back to back.

    A launch that overlaps its predecessor must wait before it reads the predecessor's output as A. The same holds for
    B, unless B may be taken as constant. It must also wait before it overwrites the predecessor's inputs.
    """
    p = context.problem
    if _needs_constant_weights(context):  # always proved, if need be on other extents: they are what overlaps most
        side = min(p.n, p.k)
        p = replace(p, n=side, k=side)
        config = context.entry.config  # type: ignore[attr-defined]
        if why_illegal(p, config, gpu_of_device(context.gpu_index)) is not None:
            return
    if p.n == p.k:
        _linked(context, p, lambda result, a, b: (result, b))
    if p.b_shape == (p.m, p.n) and not _needs_constant_weights(context):
        _linked(context, p, lambda result, a, b: (a, result))


def _linked(context: ProofContext, p: Problem, inputs: Callable[[Any, Any, Any], tuple[Any, Any]]) -> None:
    """Calls of which every second one takes ``inputs(result of the one before, a, b)``."""
    import torch

    scale = p.k**-0.5
    (a0, b0), (a1, b1) = ((x.clone(), y.clone()) for x, y in (context.normal(seed, scale, p) for seed in (13, 14)))
    empty = [torch.empty((p.m, p.n), dtype=torch_dtype(p), device=context.device) for _ in range(3)]
    middle, x, y = empty
    calls = [
        context.entry.bind(p, a0, b0, middle),
        context.entry.bind(p, *inputs(middle, a0, b1), x),
        context.entry.bind(p, a1, b0, middle),
        context.entry.bind(p, *inputs(middle, a1, b1), y),
    ]

    def outputs(between: Callable[[], None]) -> tuple[Any, Any]:
        for tensor in empty:
            tensor.fill_(float("nan"))
        context.wait()
        for _ in range(3):
            for call in calls:
                call(context.stream)
                between()
        context.wait()
        return x.clone(), y.clone()

    apart, together = outputs(context.wait), outputs(lambda: None)
    if not (equal_bits(apart[0], together[0]) and equal_bits(apart[1], together[1])):
        raise _broken("dependent back-to-back calls overlap incorrectly")


def _needs_constant_weights(context: ProofContext) -> bool:
    """Return True if the candidate is a kernel that may read B before its predecessor has ended."""
    return bool(getattr(getattr(context.entry, "config", None), "early", False))


def _threads() -> int:
    """Threads of this process, those of native code included (0 where the system does not tell)."""
    folder = "/proc/self/task"
    return len(os.listdir(folder)) if os.path.isdir(folder) else 0


def _broken(detail: str) -> GateFailed:
    return GateFailed(Status.RULE_BROKEN, detail)
