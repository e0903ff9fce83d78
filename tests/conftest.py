"""What every test shares: kernels on a CPU, Ctrl-C, hypothesis without a deadline (a busy machine is not a failure)."""

import os
import signal
from pathlib import Path

from hypothesis import settings

# Without a GPU, Triton's interpreter runs the kernels; `triton.jit` asks for it where a kernel is defined.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that puts the tests into the background lets them ignore these, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("dfo", deadline=None)
settings.load_profile("dfo")
