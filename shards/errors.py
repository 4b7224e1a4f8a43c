"""The errors of all three programs, by what the caller should do about them.

Every message is one line: which file, field or sample; what was found; what was expected; what to do next.
"""


class UsageError(Exception):
    """Bad input or configuration, found before any work. Exit code 2."""


class RunError(Exception):
    """Failed while running; what was finished before is kept. Exit code 1."""


class CorruptError(RunError):
    """Bytes on disk are not what was written: names the shard, and the frame and sample where known."""
