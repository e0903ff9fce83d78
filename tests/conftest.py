"""What every test shares: hypothesis without a deadline, because a busy machine is not a failure; kernels on a CPU."""

import os
from pathlib import Path

from hypothesis import settings

# Without a GPU, Triton's interpreter runs the kernels; `triton.jit` asks for it where a kernel is defined.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("dfo", deadline=None)
settings.load_profile("dfo")
