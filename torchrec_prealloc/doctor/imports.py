"""Whether torch, FBGEMM and TorchRec can be imported, tried where a crash does no harm."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchrec_prealloc.doctor import probe
from torchrec_prealloc.launch import SWITCH

SECONDS = 120


class Import(NamedTuple):
    """What became of an import."""

    error: str
    """Empty: it works."""
    known: Mapping[str, Any]


def try_imports() -> dict[str, Import]:
    """Import torch, FBGEMM and TorchRec in another process."""
    others = {name: value for name, value in os.environ.items() if name != SWITCH}
    source = Path(probe.__file__).read_text(encoding="utf-8")
    found = {name: Import("it was not tried: what comes before it failed", {}) for name in probe.NAMES}
    try:
        done = subprocess.run(
            [sys.executable, "-c", source], capture_output=True, text=True, timeout=SECONDS, env=others, check=False
        )
        output, ended = done.stdout, _ending(done.returncode)
    except subprocess.TimeoutExpired as expired:
        output, ended = _text(expired.stdout), f"its import takes longer than {SECONDS} s"
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            name, error, known = json.loads(line)
            found[name] = Import(ended if error is None else error, known)
    return found


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _ending(status: int) -> str:
    if status < 0:
        return f"its import ends the process ({signal.Signals(-status).name})"
    return f"its import ends the process with status {status}"
