"""Runs the pipelines' tests against TorchRec versions beside the installed one, and prints a table.

    .venv/bin/python .ci/test_versions.py [--fast] [VERSION ...]

Each version lies in a directory of its own under .venv, with that of what it requires which .venv does not have; it
runs with the torch and FBGEMM of .venv. What a version lacks, or cannot do with that torch, is a skipped test, whose
reason stands under the table.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from importlib.machinery import PathFinder
from pathlib import Path

import bootstrap

PLACE = bootstrap.ROOT / ".venv" / "torchrec-versions"
VERSIONS = ("1.2.0", "1.4.0", "1.5.1", "1.6.1", "1.7.0", "1.8.0", "1.9.2")
FAST = ("1.2.0", "1.9.2")
"""The oldest and the newest; `make test` goes on with the one of .venv."""
NAMES = ("every_pipeline", "switches", "pipelines", "faults", "uses", "config", "distributed")
TESTS = tuple(f"tests/test_{name}.py" for name in NAMES)
FAST_TESTS = TESTS[:1]
WITH = ("iopath", "portalocker")
"""What `torchrec.datasets` of a version before 1.8 imports."""
AT_MOST = 900
"""Seconds that the tests of one version may take: a pipeline that waits for ever is a failure."""


@dataclasses.dataclass
class Outcome:
    """What the tests of one version gave."""

    version: str
    passed: int = 0
    skipped: "collections.Counter[str]" = dataclasses.field(default_factory=collections.Counter)
    failed: int = 0
    seconds: float = 0.0
    output: str = ""

    def row(self) -> str:
        numbers = (self.passed, sum(self.skipped.values()), self.failed, round(self.seconds))
        return f"{self.version:<8}" + "".join(f"{number:>9}" for number in numbers)


def install(version: str) -> Path:
    """The directory of a TorchRec version, made if need be.

    Raises:
        bootstrap.Problem: pip cannot get it; the text says why.
    """
    place = PLACE / version
    if not (place / f"torchrec-{version}.dist-info").is_dir():
        part = PLACE / f"{version}.part"  # an interrupted installation is not taken for a finished one
        shutil.rmtree(part, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
        done = subprocess.run(
            [*pip, "--no-deps", "--target", str(part), f"torchrec=={version}", *WITH],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise bootstrap.Problem(f"TorchRec {version} is not tested: {bootstrap.pip_problem(done.stdout)}")
        shutil.rmtree(place, ignore_errors=True)
        part.rename(place)
    return place


def run(version: str, place: Path, tests: "tuple[str, ...]") -> Outcome:
    """The tests with the TorchRec that lies in `place`."""
    report = PLACE / f"{version}.xml"
    report.unlink(missing_ok=True)
    found = PathFinder.find_spec("torchrec", [str(place)])
    assert found is not None, f"no torchrec in {place}"
    paths = [str(place), *filter(None, [os.environ.get("PYTHONPATH")])]
    options = ["-q", "-p", "no:logging", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    outcome, started = Outcome(version), time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=bootstrap.ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=AT_MOST,
        )
        outcome.output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        outcome.output, code = f"{text}\nnot finished after {AT_MOST} s", 1
    outcome.seconds = time.monotonic() - started
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        skips = case.findall("skipped")
        outcome.skipped.update(str(skip.get("message")) for skip in skips)
        bad = case.find("failure") is not None or case.find("error") is not None
        outcome.failed += bad
        outcome.passed += not bad and not skips
    # Also what fails outside of a test, or runs none, is a failure.
    if not outcome.failed and (code or not outcome.passed):
        outcome.failed = 1
    return outcome


def reasons(outcomes: "list[Outcome]") -> "list[str]":
    """For each reason to skip, how many tests of which versions."""
    where = collections.defaultdict(list)
    for outcome in outcomes:
        for reason, count in outcome.skipped.items():
            text = re.sub(r"TorchRec \d[\d.]*(?= (has|of|itself|does))", "this TorchRec", reason)
            where[text].append(f"{outcome.version} ({count})")
    return [f"  {reason}: {', '.join(versions)}" for reason, versions in sorted(where.items())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"by default {', '.join(VERSIONS)}")
    parser.add_argument("--fast", action="store_true", help="every pipeline, with the oldest and the newest version")
    args = parser.parse_args()
    versions = args.versions or (FAST if args.fast else VERSIONS)
    tests = FAST_TESTS if args.fast else TESTS
    try:
        places = {version: install(version) for version in versions}
    except bootstrap.Problem as problem:
        print(f"test-versions: {problem}", file=sys.stderr)
        return 1
    outcomes = []
    print("TorchRec   passed  skipped   failed  seconds", flush=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        for outcome in threads.map(lambda version: run(version, places[version], tests), versions):
            outcomes.append(outcome)
            print(outcome.row(), flush=True)
            if outcome.failed:
                print(outcome.output, file=sys.stderr, flush=True)
    print("Skipped, and why (tests):", *reasons(outcomes), sep="\n")
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
