"""Programmatic edges between the kernel nodes of a captured graph: count them, or make them.

cuBLASLt has no public option for programmatic dependent launch. A captured graph can be changed from outside, so a
reader may ask what the rivals gain by it. The edges are safe only if the later kernel waits by
``griddepcontrol.wait`` before it touches memory, which cuBLASLt does not promise.
"""

from __future__ import annotations

from typing import Any

from outblas.runtime.driver import check, driver


def make_edges_programmatic(graph: Any) -> int:
    """Make each edge from one kernel node to another programmatic, in place; return the number of changed ones.

    The later kernel may start once all CTAs of the earlier one have asked for it, or ended.

    Raises:
        DeviceError: the driver refuses an edge.
    """
    cu = driver()
    kernel = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    programmatic = cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    *_, count = check("cuGraphGetEdges", cu.cuGraphGetEdges(graph))
    if not count:
        return 0
    begins, ends, kinds, count = check("cuGraphGetEdges", cu.cuGraphGetEdges(graph, count))
    changed = 0
    for begin, end, kind in zip(begins[:count], ends[:count], kinds[:count], strict=True):
        nodes = [check("cuGraphNodeGetType", cu.cuGraphNodeGetType(node)) for node in (begin, end)]
        if nodes != [kernel, kernel] or kind.type == int(programmatic):
            continue
        check("cuGraphRemoveDependencies", cu.cuGraphRemoveDependencies(graph, [begin], [end], [kind], 1))
        edge = cu.CUgraphEdgeData()
        edge.type = int(programmatic)
        edge.from_port = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
        check("cuGraphAddDependencies", cu.cuGraphAddDependencies(graph, [begin], [end], [edge], 1))
        changed += 1
    return changed


def count_programmatic_edges(graph: Any) -> int:
    """Return the number of edges over which a kernel may start before its predecessor has ended.

    Raises:
        DeviceError: the driver does not name the edges.
    """
    cu = driver()
    programmatic = int(cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
    *_, count = check("cuGraphGetEdges", cu.cuGraphGetEdges(graph))
    if not count:
        return 0
    *_, kinds, count = check("cuGraphGetEdges", cu.cuGraphGetEdges(graph, count))
    return sum(kind.type == programmatic for kind in kinds[:count])
