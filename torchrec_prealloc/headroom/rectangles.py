"""Segments and blocks as rectangles in time and address, for the picture."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from torchrec_prealloc.headroom import snapshot as fields
from torchrec_prealloc.headroom.snapshot import Snapshot

MOST_BLOCKS, MOST_SEGMENTS = 30_000, 3_000


@dataclass(slots=True)
class Rectangle:
    """Memory from one entry of the history to another; -1: from before the first, `len(trace)`: until the end.

    Attributes:
        stream: its number
        size: bytes
        place: bytes above the stream's floor
    """

    stream: int
    address: int
    size: int
    begin: int
    end: int
    place: int = 0


def segments_of(snapshot: Snapshot, device: int) -> list[Rectangle]:
    """All segments that there were, the largest `MOST_SEGMENTS`, each at a place of its stream that was free then."""
    trace = snapshot.traces[device]
    alive: dict[int, Rectangle] = {}
    found: list[Rectangle] = []
    for entry, action in enumerate(trace.action):
        if action in (fields.SEGMENT_ALLOC, fields.SEGMENT_MAP):
            stream = snapshot.streams[trace.stream[entry]]
            alive[trace.address[entry]] = Rectangle(
                stream, trace.address[entry], trace.size[entry], entry, len(trace)
            )
            found.append(alive[trace.address[entry]])
        elif action in (fields.SEGMENT_FREE, fields.SEGMENT_UNMAP):
            address, size = trace.address[entry], trace.size[entry]
            ended = alive.pop(address, None)
            if ended is None:
                ended = Rectangle(snapshot.streams[trace.stream[entry]], address, size, -1, entry)
                found.append(ended)
            ended.end = entry
    for segment in snapshot.segments:
        if segment.device == device and segment.address not in alive:
            found.append(
                Rectangle(snapshot.streams[segment.stream], segment.address, segment.size, -1, len(trace))
            )
    found.sort(key=lambda rectangle: -rectangle.size)
    found = sorted(found[:MOST_SEGMENTS], key=lambda rectangle: rectangle.begin)
    for stream in {rectangle.stream for rectangle in found}:
        _place([rectangle for rectangle in found if rectangle.stream == stream])
    return found


def _place(segments: list[Rectangle]) -> None:
    """Give each, in the order of their begins, the lowest place at which it overlaps no other of its time."""
    standing: list[Rectangle] = []  # by place
    for segment in segments:
        standing = [other for other in standing if other.end > segment.begin]
        floor = 0
        for other in standing:
            if other.place - floor >= segment.size:
                break
            floor = max(floor, other.place + other.size)
        segment.place = floor
        bisect.insort(standing, segment, key=lambda rectangle: rectangle.place)


def blocks_of(snapshot: Snapshot, device: int, segments: list[Rectangle], least: int) -> list[Rectangle]:
    """The blocks that tensors had (also those that waited for streams), of at least `least` bytes, in `segments`."""
    trace = snapshot.traces[device]
    alive: dict[int, Rectangle] = {}
    found: list[Rectangle] = []
    for entry, action in enumerate(trace.action):
        if trace.size[entry] < least:
            continue
        address = trace.address[entry]
        if action == fields.ALLOC:
            alive[address] = Rectangle(
                snapshot.streams[trace.stream[entry]], address, trace.size[entry], entry, len(trace)
            )
            found.append(alive[address])
        elif action in (fields.FREE_COMPLETED, fields.FREE):
            ended = alive.pop(address, None)
            if ended is None:
                ended = Rectangle(snapshot.streams[trace.stream[entry]], address, trace.size[entry], -1, entry)
                found.append(ended)
            ended.end = entry
    for segment in snapshot.segments:
        for block in segment.blocks if segment.device == device else ():
            if block.state != fields.INACTIVE and block.requested >= least and block.address not in alive:
                stream = snapshot.streams[segment.stream]
                found.append(Rectangle(stream, block.address, block.requested, -1, len(trace)))
    found = sorted(found, key=lambda rectangle: -rectangle.size)[:MOST_BLOCKS]
    return _in_segments(found, segments)


def _in_segments(blocks: list[Rectangle], segments: list[Rectangle]) -> list[Rectangle]:
    """The blocks that lie in one of `segments` of their time, with their places."""
    by_address = sorted(segments, key=lambda segment: segment.address)
    addresses = [segment.address for segment in by_address]
    longest = max((segment.size for segment in segments), default=0)
    placed = []
    for block in blocks:
        for index in range(bisect.bisect_right(addresses, block.address) - 1, -1, -1):
            segment = by_address[index]
            if segment.address + longest <= block.address:
                break
            inside = block.address < segment.address + segment.size
            if inside and segment.begin <= max(block.begin, 0) and block.end <= segment.end:
                block.place = segment.place + block.address - segment.address
                placed.append(block)
                break
    return placed
