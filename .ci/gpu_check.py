"""Everything that needs a GPU, in one command of under eight minutes, without network; `make gpu-check OUT=DIR`.

    python .ci/gpu_check.py DIR [--only PART ...] [--stretch FACTOR]

Each part is a process of its own with a limit on its time. One that fails or runs over is a line in the table; the
others still run. DIR gets at most eight files: gpu-check.json with all figures, a picture of each benchmark and of each
memory snapshot, and logs.tar.gz with what was printed and the snapshots. gpu-check.json is written after each part
anew, so that a run that is cut short leaves what it has.

Without a GPU this is a rehearsal: the same parts run, what cannot is skipped by name, and the device is the simulator
or the CPU. Exit code 1 if any part failed.

It lies here, not in the package, because it runs the tests of this repository.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOTAL = 470
"""Seconds that all parts may take together."""
ARCHIVE_BYTES = 15 << 20
"""Of logs.tar.gz, before compression of what is already compressed; larger snapshots are left out."""
GPU, SIMULATOR, CPU = "GPU", "simulator", "CPU"
NO_GPU = "no GPU"
WAYS = ("blocking_copy", "non_blocking_copy", "preallocated_non_blocking_copy")


@dataclasses.dataclass(frozen=True)
class Part:
    """One process, and how to read what it leaves.

    Attributes:
        name: for people, and for `--only`
        seconds: that it may take
        command: of the process; gets the folder where it may write
        read: what its row says, and figures for the JSON; gets that folder and whether there is a GPU
        environment: beside this process' own
    """

    name: str
    seconds: int
    command: Callable[[Path], Sequence[str]]
    read: Callable[[Path, bool], Reading]
    environment: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass
class Reading:
    """What a part's files say. `failed`: why the part counts as failed although its process ended well."""

    on: str
    said: str
    figures: Any = None
    pictures: tuple[Path, ...] = ()
    failed: str = ""


@dataclasses.dataclass
class Outcome:
    """One row of the table. `result`: passed, failed, timed out, or skipped."""

    part: str
    result: str
    on: str
    seconds: float
    said: str
    figures: Any = None


# Parts -----------------------------------------------------------------------------------------------------------


def _python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


BUILD = """
from torchrec_prealloc import simulator
usable, reason = simulator.available()
print(f"built for {simulator.device()}" if usable else f"skipped by name: {reason}")
"""


def _simulator(work: Path) -> list[str]:
    return _python("-c", BUILD)


def _read_simulator(work: Path, gpu: bool) -> Reading:
    return Reading(CPU, _last_line(work / "log.txt"))


def _tests(work: Path) -> list[str]:
    options = ["-q", "-rf", "--tb=short", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    options += [f"--basetemp={work / 'pytest'}", f"--junit-xml={work / 'tests.xml'}"]
    return _python("-m", "pytest", "-m", "gpu and not long", *options, "tests")


def _read_tests(work: Path, gpu: bool) -> Reading:
    cases = list(ElementTree.parse(work / "tests.xml").iter("testcase"))
    skips = [str(skip.get("message")) for case in cases for skip in case.findall("skipped")]
    bad = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    passed = len(cases) - len(skips) - len(bad)
    reasons = {reason: skips.count(reason) for reason in sorted(set(skips))}
    figures = {"passed": passed, "failed": bad, "skipped": reasons}
    if not gpu:
        return Reading(CPU, f"skipped by name, no GPU: {len(skips)} tests, all collected", figures)
    said = f"{passed} passed, {len(skips)} skipped, {len(bad)} failed"
    return Reading(GPU, said, figures, failed="" if passed else "no test ran")


def _loops(work: Path) -> list[str]:
    return _python(".ci/gpu_loops.py", str(work / "loops.json"))


def _read_loops(work: Path, gpu: bool) -> Reading:
    loops = json.loads((work / "loops.json").read_text(encoding="utf-8"))
    counts = {key: sum(1 for one in loops if one["outcome"] == key) for key in ("passed", "failed", "skipped")}
    said = f"{counts['passed']} loops passed, {counts['failed']} failed, {counts['skipped']} skipped"
    if not gpu:
        said += "; torch.cuda._sanitizer skipped by name, no GPU"
    return Reading(loops[0]["on"], said, loops, failed="" if counts["passed"] else "no loop ran")


def _bench(name: str) -> Callable[[Path], list[str]]:
    return lambda work: _python("-m", "torchrec_prealloc", "bench", name, "--out", str(work))


def _read_bench(name: str) -> Callable[[Path, bool], Reading]:
    def read(work: Path, gpu: bool) -> Reading:
        table = json.loads((work / f"{name}.json").read_text(encoding="utf-8"))
        places = sorted({str(row["on"]) for row in table["rows"]})
        failed = "nothing was measured on the GPU" if gpu and GPU not in places else ""
        missed = [
            line.removeprefix("missed: ")
            for line in (work / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
            if line.startswith("missed: ")
        ]
        said = f"{len(table['rows'])} rows, {len(missed)} targets missed"
        return Reading(", ".join(places), said, {**table, "missed": missed}, (work / f"{name}.png",), failed)

    return read


def _snapshots(work: Path) -> list[str]:
    return _python(".ci/gpu_snapshots.py", str(work))


def _read_snapshots(work: Path, gpu: bool) -> Reading:
    path = work / "snapshots.json"
    if not path.exists():
        return Reading(CPU, "skipped by name, no GPU and no simulator", failed="no snapshot" if gpu else "")
    found = json.loads(path.read_text(encoding="utf-8"))
    reserved = ", ".join(f"{one['peak_reserved'] / (1 << 20):.0f}" for one in found)
    return Reading(found[0]["on"], f"MiB reserved in the three ways: {reserved}", found)


def _headroom(way: str) -> Callable[[Path], list[str]]:
    def command(work: Path) -> list[str]:
        snapshot = work.parent / "snapshots" / f"{way}.pickle"
        plot = work / f"headroom-{way}.png"
        return _python(
            "-m", "torchrec_prealloc", "headroom", str(snapshot), "--plot", str(plot), "--out", str(work / "out")
        )

    return command


def _read_headroom(work: Path, gpu: bool) -> Reading:
    (found,) = json.loads((work / "out" / "headroom.json").read_text(encoding="utf-8"))
    text = (work / "log.txt").read_text(encoding="utf-8", errors="replace")
    now, back = (f"{found['estimate'][key] / (1 << 20):.0f} MiB" for key in ("now", "gives_back"))
    said = f"{now} reserved, of which preallocation gives back {back}"
    return Reading(GPU if gpu else SIMULATOR, said, {**found, "text": text}, tuple(work.glob("headroom-*.png")))


SANITIZER = (("TORCH_CUDA_SANITIZER", "1"),)
# Products of matrices on several streams are the same from run to run only with workspaces of their own.
REPEATABLE = (("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),)
# The headroom report runs a history again on the simulator, which can be had only where no GPU is seen.
NO_GPU_SEEN = (("CUDA_VISIBLE_DEVICES", ""),)


def parts(gpu: bool) -> list[Part]:
    """All of them, in the order in which they run: what others need first, then what a cut would be worst for."""
    watching = SANITIZER if gpu else ()
    return [
        Part("simulator", 50, _simulator, _read_simulator, NO_GPU_SEEN),
        Part("tests", 110, _tests, _read_tests, REPEATABLE),
        Part("sanitizer", 50, _loops, _read_loops, watching),
        Part("bench-modes", 30, _bench("modes"), _read_bench("modes")),
        Part("bench-transfer", 90, _bench("transfer"), _read_bench("transfer")),
        Part("snapshots", 30, _snapshots, _read_snapshots),
        *(Part(f"headroom-{way}", 18, _headroom(way), _read_headroom, NO_GPU_SEEN) for way in WAYS),
        Part("bench-checkpoint", 50, _bench("checkpoint"), _read_bench("checkpoint")),
    ]


# Running them ----------------------------------------------------------------------------------------------------


def run_part(part: Part, work: Path, seconds: float, gpu: bool) -> tuple[Outcome, tuple[Path, ...]]:
    """Run one part, for so many seconds at most; also its pictures."""
    work.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    code = _run(part, work, seconds)
    took = time.monotonic() - started
    on = GPU if gpu else CPU
    if code is None:
        reading = _reading(part, work, gpu)
        so_far = f"; until then: {reading.said}" if reading else ""
        figures = reading.figures if reading else None
        return Outcome(part.name, "timed out", on, took, f"after {seconds:.0f} s{so_far}", figures), ()
    reading = _reading(part, work, gpu)
    if reading is None:
        return Outcome(part.name, "failed", on, took, f"exit code {code}: {_last_line(work / 'log.txt')}"), ()
    pictures = tuple(path for path in reading.pictures if path.exists())
    if code or reading.failed:
        said = reading.failed or f"exit code {code}: {reading.said}"
        return Outcome(part.name, "failed", reading.on, took, said, reading.figures), pictures
    result = "skipped" if reading.said.startswith("skipped by name") else "passed"
    return Outcome(part.name, result, reading.on, took, reading.said, reading.figures), pictures


def environment(more: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
    """Of the processes: they find this checkout's package whether it is installed or not."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **dict(more)}


def _run(part: Part, work: Path, seconds: float) -> int | None:
    """The exit code; None where the time ran out."""
    with open(work / "log.txt", "wb") as log:
        process = subprocess.Popen(
            part.command(work),
            cwd=ROOT,
            env=environment(part.environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that it can be ended with all that it has started
        )
        try:
            return process.wait(timeout=max(seconds, 1))
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _reading(part: Part, work: Path, gpu: bool) -> Reading | None:
    try:
        return part.read(work, gpu)
    except (OSError, ValueError, LookupError, ElementTree.ParseError):
        return None


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def run_all(chosen: Sequence[Part], out: Path, work: Path, gpu: bool, stretch: float) -> Iterator[Outcome]:
    """Run the parts one after the other, and copy their pictures to `out`."""
    end = time.monotonic() + TOTAL * stretch
    for part in chosen:
        seconds = min(part.seconds * stretch, end - time.monotonic())
        if seconds < 1:
            yield Outcome(part.name, "timed out", GPU if gpu else CPU, 0.0, "no time was left for it")
            continue
        outcome, pictures = run_part(part, work / part.name, seconds, gpu)
        for picture in pictures:
            shutil.copy(picture, out / picture.name)
        yield outcome


# What is shown and kept ------------------------------------------------------------------------------------------


def table(outcomes: Sequence[Outcome]) -> str:
    """The rows, aligned."""
    lines = [("part", "result", "on", "seconds", "what")]
    lines += [(one.part, one.result, one.on, f"{one.seconds:.0f}", one.said) for one in outcomes]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))  # type: ignore[arg-type]
    return "\n".join(
        "  ".join([part.ljust(widths[0]), result.ljust(widths[1]), on.ljust(widths[2]), seconds.rjust(widths[3]), said])
        for part, result, on, seconds, said in lines
    )


MACHINE = """
import dataclasses, json
from torchrec_prealloc.bench.machine import describe_machine
print(json.dumps(dataclasses.asdict(describe_machine())))
"""


def describe() -> dict[str, Any]:
    """The machine. Another process is asked: this one must not hold the GPU, which may serve one at a time."""
    command = _python("-c", MACHINE)
    asked = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    lines = asked.stdout.splitlines()
    if asked.returncode or not lines:
        return {"gpu": NO_GPU, "error": asked.stderr.strip().rpartition("\n")[2]}
    machine: dict[str, Any] = json.loads(lines[-1])
    return machine


def write_json(out: Path, machine: Mapping[str, Any], outcomes: Sequence[Outcome], left_out: Sequence[str]) -> None:
    """Write gpu-check.json."""
    content = {
        "machine": machine,
        "parts": [dataclasses.asdict(one) for one in outcomes],
        "left_out": list(left_out),
    }
    (out / "gpu-check.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def archive(out: Path, work: Path) -> list[str]:
    """Write logs.tar.gz; returns what had no room in it."""
    left_out, total = [], 0
    logs = sorted(work.glob("*/log.txt"))
    snapshots = sorted(work.glob("snapshots/*.pickle"))
    with tarfile.open(out / "logs.tar.gz", "w:gz") as tar:
        for path in [*logs, *snapshots]:
            size = path.stat().st_size
            if total + size > ARCHIVE_BYTES:
                left_out.append(f"{path.parent.name}/{path.name} ({size} bytes)")
                continue
            total += size
            tar.add(path, f"{path.parent.name}-{path.name}")
    return left_out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Everything that needs a GPU; without one, a rehearsal.")
    parser.add_argument("out", type=Path, metavar="DIR", help="where the results go; made where it is missing")
    parser.add_argument("--only", nargs="+", metavar="PART", help="run these parts only")
    longer = "times the limits of a GPU machine; 1 on a GPU, by default, and 4 in a rehearsal"
    parser.add_argument("--stretch", type=float, metavar="FACTOR", help=longer)
    args = parser.parse_args(arguments)
    machine = describe()
    gpu = machine["gpu"] != NO_GPU
    known = parts(gpu)
    unknown = sorted(set(args.only or ()) - {part.name for part in known})
    if unknown:
        parser.error(f"no part {unknown[0]!r}; there are: {', '.join(part.name for part in known)}")
    chosen = [part for part in known if not args.only or part.name in args.only]
    stretch = args.stretch or (1.0 if gpu else 4.0)
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"gpu-check: {'on ' + machine['gpu'] if gpu else 'a rehearsal, there is no GPU'}", flush=True)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        for outcome in run_all(chosen, args.out, Path(folder), gpu, stretch):
            outcomes.append(outcome)
            print(f"{outcome.part}: {outcome.result}, {outcome.seconds:.0f} s: {outcome.said}", flush=True)
            write_json(args.out, machine, outcomes, ())
        write_json(args.out, machine, outcomes, archive(args.out, Path(folder)))
    print(f"\n{table(outcomes)}")
    bad = [one.part for one in outcomes if one.result not in ("passed", "skipped")]
    print(f"gpu-check: {'failed: ' + ', '.join(bad) if bad else 'all is well'}; results in {args.out}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
