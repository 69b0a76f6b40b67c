"""`python -m torchrec_prealloc`, which is what torchrun starts."""

from torchrec_prealloc.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
