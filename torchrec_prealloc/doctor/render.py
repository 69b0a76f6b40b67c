"""An explanation as text: one line for each leaf, or for many that are alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torchrec_prealloc.doctor.explained import ExplainedLeaf, ExplainedNode
from torchrec_prealloc.doctor.reasons import Route, size_text

if TYPE_CHECKING:
    from torchrec_prealloc.doctor.explain import Explanation

MAX_LINES = 20
"""Lines for the children of one container; what goes beyond is summed up in one."""
ALIKE = 4
"""Children of one container from which on those that are alike are one line."""


class Line(NamedTuple):
    """One line of the tree."""

    depth: int
    name: str
    what: str
    nbytes: int | None = None
    pinned: str = ""
    route: str = ""
    why: str = ""
    note: str = ""
    """In place of the last three."""


def render(explanation: Explanation) -> str:
    """The report."""
    lines = list(_tree(explanation.root, 0, [explanation.root]))
    parts = [_head(explanation), "", *_columns(lines), "", *_sums(explanation)]
    if explanation.advice:
        parts += ["", "What costs time:", *(f"  - {advice}" for advice in explanation.advice)]
    else:
        parts += ["", "What costs time: nothing that is known."]
    return "\n".join(parts)


def _head(explanation: Explanation) -> str:
    head = f"A batch of class {explanation.batch_type} for {explanation.device}"
    if not explanation.device_is_here:
        head += " (no such device here: this is what would happen there)"
    if explanation.taken_for_pinned:
        head += "\nIts memory is taken for pinned, whatever it is here."
    elif not explanation.can_pin and explanation.device.type != "cpu":
        head += "\nNothing can be pinned here, without an accelerator: what is large would be direct if it were pinned."
    return head


# The tree --------------------------------------------------------------------------------------------------------


def _tree(node: ExplainedNode, depth: int, alike: Sequence[ExplainedNode]) -> Iterator[Line]:
    """The lines of a node, which stands for all that are `alike`."""
    times = len(alike)
    name = node.name.lstrip(".") if times == 1 else f"{node.name} ... {alike[-1].name}".replace(" .", " ").lstrip(".")
    count = f"{times} × " if times > 1 else ""
    if node.again:
        yield Line(depth, name, f"{count}{node.type}", note=f"the same as {node.again}")
        return
    if node.leaf is not None:
        yield _leaf_line(node.leaf, depth, name, times, count)
        return
    note = "; ".join(filter(None, [node.note, "each:" if times > 1 else ""]))
    yield Line(depth, name, count + node.type, sum(leaf.nbytes for leaf in _leaves(alike)), note=note)
    shown: list[list[ExplainedNode]] = []
    groups: dict[object, list[ExplainedNode]] = {}
    for child in node.children:
        groups.setdefault(_alike(child), []).append(child)
    for group in groups.values():
        shown += [group] if len(group) >= ALIKE else [[one] for one in group]
    order = {id(child): index for index, child in enumerate(node.children)}
    shown.sort(key=lambda group: order[id(group[0])])
    rest: list[ExplainedNode] = []
    if len(shown) > MAX_LINES:
        rest = [one for group in shown[MAX_LINES - 1 :] for one in group]
        shown = shown[: MAX_LINES - 1]
    for group in shown:
        yield from _tree(group[0], depth + 1, group)
    if rest:
        yield _rest_line(rest, depth + 1)


def _leaves(nodes: Sequence[ExplainedNode]) -> list[ExplainedLeaf]:
    """The leaves below these nodes that are not met elsewhere before."""
    return [one.leaf for node in nodes for one in node.nodes() if one.leaf is not None and not one.again]


def _alike(node: ExplainedNode) -> object:
    """Equal for nodes that are worth one line together."""
    if node.again:
        return "again", node.again
    if node.leaf is not None:
        leaf = node.leaf
        return leaf.type, leaf.dtype, leaf.shape, leaf.pinned, leaf.dense, leaf.route, leaf.why, leaf.shared
    return node.type, node.note, tuple((child.name, _alike(child)) for child in node.children)


def _leaf_line(leaf: ExplainedLeaf, depth: int, name: str, times: int, count: str) -> Line:
    why = leaf.why
    if leaf.shared > 1:
        why += f"; shares its storage with {leaf.shared - 1} more"
    pinned = {True: "pinned", False: "unpinned", None: ""}[leaf.pinned]
    return Line(depth, name, count + _form(leaf), times * leaf.nbytes, pinned, leaf.route.value, why)


def _form(leaf: ExplainedLeaf) -> str:
    dtype = str(leaf.dtype).removeprefix("torch.")
    shape = "[nested]" if leaf.shape is None else str(list(leaf.shape)).replace(" ", "")
    kind = "" if leaf.type == "Tensor" else f"{leaf.type} "
    return f"{kind}{dtype}{shape}" + (" not dense" if leaf.dense is False else "")


def _rest_line(rest: Sequence[ExplainedNode], depth: int) -> Line:
    leaves = _leaves(rest)
    routes = Counter(leaf.route.value for leaf in leaves)
    return Line(
        depth,
        f"{len(rest)} more",
        ", ".join(f"{count} × {kind}" for kind, count in Counter(node.type for node in rest).most_common()),
        sum(leaf.nbytes for leaf in leaves),
        note=", ".join(f"{count} {route}" for route, count in routes.most_common()),
    )


def _columns(lines: Sequence[Line]) -> Iterator[str]:
    rows = [("  " * line.depth + line.name, line.what, "" if line.nbytes is None else size_text(line.nbytes))
            for line in lines]  # fmt: skip
    first, second, third = (max(map(len, column)) for column in zip(*rows, strict=True))
    pinned, route = (max(len(getattr(line, name)) for line in lines) for name in ("pinned", "route"))
    for line, (name, what, nbytes) in zip(lines, rows, strict=True):
        pin = f"{line.pinned:<{pinned}}  " if pinned else ""
        rest = line.note or f"{pin}{line.route:<{route}}  {line.why}"
        yield f"{name:<{first}}  {what:<{second}}  {nbytes:>{third}}  {rest}".rstrip()


# Sums ------------------------------------------------------------------------------------------------------------


def _sums(explanation: Explanation) -> Iterator[str]:
    copies, segments = explanation.copies, len(explanation.segments)
    yield (
        f"{len(explanation.leaves)} leaves, {size_text(explanation.nbytes)}: {copies} "
        f"{'copy' if copies == 1 else 'copies'} of {size_text(explanation.copied_bytes)} into {segments} "
        f"{'allocation' if segments == 1 else 'allocations'} of {size_text(explanation.allocated_bytes)}"
    )
    for route in Route:
        leaves = explanation.of_route(route)
        if leaves:
            count = len(leaves)
            yield f"  {count:>6} {route.value}, {size_text(sum(leaf.nbytes for leaf in leaves))}"
