"""What can be imported here, run in a process of its own: an import that crashes takes nobody along.

It needs nothing of this package, and prints one line of JSON for each module: the name, an error or "", and what else
is known. A line without an error or "" comes before each import, so that the last one names what crashed.
"""

import importlib
import json
import warnings
from typing import Any

NAMES = ("torch", "fbgemm_gpu", "torchrec")
"""In this order: FBGEMM's libraries need torch's."""
OPERATOR = "asynchronous_complete_cumsum"
"""Of FBGEMM; the first that a KeyedJaggedTensor calls."""


def main() -> None:
    """Import each, and say how it went."""
    warnings.simplefilter("ignore")
    for name in NAMES:
        _say(name, None, {})
        try:
            module = importlib.import_module(name)
            if name == "fbgemm_gpu":
                _find_operator()
            known = {"version": str(getattr(module, "__version__", ""))}
            known.update(_torch(module) if name == "torch" else _kernels() if name == "fbgemm_gpu" else {})
        except BaseException as error:
            _say(name, f"{type(error).__name__}: {' '.join(str(error).split())}", {})
        else:
            _say(name, "", known)


def _say(name: str, error: "str | None", known: "dict[str, Any]") -> None:
    print(json.dumps([name, error, known]), flush=True)


def _torch(torch: Any) -> "dict[str, Any]":
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = bool(torch.cuda.is_available())
    driver = getattr(torch._C, "_cuda_getDriverVersion", int)
    try:
        supports = int(driver())
    except Exception:
        supports = 0
    return {
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if available else [],
        "driver_supports": f"{supports // 1000}.{supports % 1000 // 10}" if supports else "",
        "said": " ".join(" ".join(str(one.message).split()) for one in caught),
    }


def _find_operator() -> None:
    import torch

    if not hasattr(torch.ops.fbgemm, OPERATOR):
        raise ImportError(f"it was imported without its operators: torch.ops.fbgemm has no {OPERATOR}")


def _kernels() -> "dict[str, Any]":
    import torch

    return {"on_gpu": bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"fbgemm::{OPERATOR}", "CUDA"))}


if __name__ == "__main__":
    main()
