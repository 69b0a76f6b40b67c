"""The machine that figures come from, without anything that names or locates it."""

import dataclasses
import datetime
import importlib.metadata
import os
import platform

import torch

NO_GPU = "no GPU"
GPU, CPU, SIMULATOR = "GPU", "CPU", "simulator"
"""Where a row was measured."""
_FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-nightly", "fbgemm-gpu-nightly-cpu")
_TORCHREC = ("torchrec", "torchrec-nightly")


@dataclasses.dataclass(frozen=True)
class Machine:
    """Cores that this process may use, models of CPU and GPU, versions, and the day (UTC, ISO 8601)."""

    cores: int
    cpu: str
    gpu: str
    python: str
    torch: str
    torchrec: str
    fbgemm: str
    date: str

    def line(self) -> str:
        """One line for people, e.g. under a table."""
        return (
            f"{self.cores} cores ({self.cpu}), {self.gpu}; torch {self.torch}, torchrec {self.torchrec}, "
            f"FBGEMM {self.fbgemm}, Python {self.python}; {self.date}"
        )


def describe_machine() -> Machine:
    """The machine that this runs on."""
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        cpu=_cpu_model(),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else NO_GPU,
        python=platform.python_version(),
        torch=str(torch.__version__),
        torchrec=_version(_TORCHREC),
        fbgemm=_version(_FBGEMM),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )


def measured_on(device: torch.device) -> str:
    """What a row says of the device that it was measured on."""
    return {"cpu": CPU, "mtia": SIMULATOR}.get(device.type, GPU)


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        models = []
    return models[0] if models else platform.machine()


def _version(distributions: tuple[str, ...]) -> str:
    """Version of the first of these distributions that is installed; they provide the same module."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
