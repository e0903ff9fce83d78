# Two questions to the Linux kernel that Python's library does not ask.
import ctypes

SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36


def prctl(option, value):
    """Best effort: nothing that is right depends on it, only how soon something ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
