"""What TorchRec and PyTorch say to their own developers, kept from a command's reader."""

from __future__ import annotations

import logging
import os
import warnings


def silence() -> None:
    """Hide what TorchRec logs and warns about: advice that a reader of our commands cannot follow.

    PyTorch's C++ reads its level when it is loaded: call this before torch is imported.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in ("torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
