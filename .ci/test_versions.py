"""Runs the pipelines' tests against each TorchRec version that we support, and prints a table.

    .venv/bin/python .ci/test_versions.py [--fast] [VERSION ...]

Each version lies in a directory of its own under .venv, without what it requires: it runs with the torch and FBGEMM of
.venv. What a version lacks, or cannot do with that torch, is a skipped test, whose reason stands under the table.
"""

import argparse
import collections
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / ".venv" / "torchrec-versions"
VERSIONS = ("1.2.0", "1.4.0", "1.5.1", "1.6.1", "1.7.0", "1.8.0", "1.9.2")
FAST = ("1.2.0", "1.9.2")
"""The oldest and the newest; `make test` has the one in between."""
TESTS = tuple(
    f"tests/test_{name}.py" for name in ("every_pipeline", "switches", "pipelines", "faults", "uses", "config")
)
FAST_TESTS = TESTS[:1]


def install(version: str) -> Path:
    """The directory of a TorchRec version, made if need be."""
    place = PLACE / version
    if not (place / "torchrec" / "version.py").exists():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", "--target", str(place), f"torchrec=={version}"], check=True)
    return place


def run(version: str, tests: "tuple[str, ...]") -> "tuple[dict[str, int], collections.Counter[str], float, str]":
    """Counts of the tests, reasons of the skipped ones, seconds, and pytest's output."""
    report = PLACE / f"{version}.xml"
    started = time.monotonic()
    paths = [str(install(version)), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:logging", f"--junit-xml={report}", *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = sum(1 for case in cases if case.find("failure") is not None or case.find("error") is not None)
    skips = [str(skip.get("message")) for case in cases for skip in case.findall("skipped")]
    failed = bad or int(done.returncode != 0)
    counts = {"passed": len(cases) - bad - len(skips), "skipped": len(skips), "failed": failed}
    return counts, collections.Counter(skips), time.monotonic() - started, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"by default {', '.join(VERSIONS)}")
    parser.add_argument("--fast", action="store_true", help="fewer versions and tests, for every commit")
    args = parser.parse_args()
    failed, reasons = False, {}
    print("TorchRec   passed  skipped   failed  seconds")
    for version in args.versions or (FAST if args.fast else VERSIONS):
        counts, skips, seconds, output = run(version, FAST_TESTS if args.fast else TESTS)
        numbers = "".join(f"{counts[name]:>9}" for name in ("passed", "skipped", "failed"))
        print(f"{version:<8}{numbers}{seconds:>9.0f}", flush=True)
        if counts["failed"]:
            failed = True
            print(output, file=sys.stderr)
        for reason, count in skips.items():
            text = re.sub(r"TorchRec \d[\d.]*(?= (has|of|itself))", "this TorchRec", reason)
            reasons.setdefault(text, {})[version] = count
    print("\nSkipped, and why:")
    for reason, where in sorted(reasons.items()):
        print(f"  {reason}: {', '.join(f'{version} ({count})' for version, count in where.items())}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
