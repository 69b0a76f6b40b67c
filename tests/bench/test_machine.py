"""The description of the machine says what matters and nothing that locates it."""

from __future__ import annotations

import dataclasses
import getpass
import platform
import re
from pathlib import Path

import torch

from torchrec_prealloc.bench.machine import NO_GPU, describe_machine


def test_it_names_versions_cores_and_day() -> None:
    machine = describe_machine()
    assert machine.torch == torch.__version__
    assert re.fullmatch(r"\d+\.\d+.*", machine.torchrec)
    assert re.fullmatch(r"\d+\.\d+.*", machine.fbgemm)
    assert machine.cores >= 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", machine.date)
    assert (machine.gpu == NO_GPU) == (not torch.cuda.is_available())


def test_it_holds_no_host_name_and_no_path() -> None:
    machine = describe_machine()
    text = " ".join(map(str, dataclasses.astuple(machine))) + machine.line()
    # Shorter names may be part of a model or a version by chance.
    private = [
        name for name in (platform.node(), getpass.getuser(), str(Path.home()), str(Path.cwd())) if len(name) > 3
    ]
    assert [name for name in private if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)] == []
