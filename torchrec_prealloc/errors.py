"""The failure that a command is expected to end with."""


class CommandError(Exception):
    """Something that a command's user can put right; the message is the one line that they see.

    Commands raise it (or a subclass) for what can be foreseen: a missing file, an option that does not fit.
    `torchrec_prealloc.cli.main` prints the message without a traceback and returns 1. Everything else is a bug and
    keeps its traceback.
    """
