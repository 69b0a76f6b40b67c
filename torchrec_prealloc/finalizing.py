"""Finalizers for what holds device memory or waits for a device."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any


def finalize(obj: object, function: Callable[..., Any], *args: Any, at_exit: bool = True) -> None:
    """Call `function(*args)` when `obj` is gone, in the process that says so.

    A forked child (a DataLoader's worker) has the same objects, and collects them when its turn comes; but it has no
    device to wait for, and neither threads nor the locks that they held.

    Args:
        at_exit: also at the end of the interpreter, if `obj` lives until then.
    """
    weakref.finalize(obj, _in_process, os.getpid(), function, args).atexit = at_exit


def _in_process(process: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if os.getpid() == process:
        function(*args)
