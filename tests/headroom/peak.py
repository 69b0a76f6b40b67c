"""Run in a process of its own: the memory that reading and reporting on a snapshot takes. Prints one line of JSON."""

import json
import sys
import time
from pathlib import Path


def resident() -> tuple[int, int]:
    """Bytes of this process in memory: now, and at most."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    now, most = (int(status[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    return now, most


def main(path: Path) -> None:
    from torchrec_prealloc.headroom import report
    from torchrec_prealloc.headroom.analysis import analyse

    before = resident()[0]
    started = time.monotonic()
    (found,) = analyse(path)
    text = report.text(found)
    print(
        json.dumps(
            {
                "before": before,
                "peak": resident()[1],
                "size": path.stat().st_size,
                "seconds": time.monotonic() - started,
                "entries": found.timeline.entries,
                "lines": len(text.splitlines()),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
