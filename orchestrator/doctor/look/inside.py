"""The inside of the target: one program, as the interpreter that trains."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from pydantic import ValidationError

from orchestrator.doctor.facts import Answer, Inside, Trouble, Wanted
from orchestrator.errors import DfoError
from orchestrator.session import Session

#: What the trainer imports.
MODULES = ("torch", "transformers", "triton", "safetensors", "numpy", "yaml")
#: Seconds for everything but GPUs, and for these as well: importing torch from a cold disk is what takes long.
DEADLINE = 45.0
GPU_DEADLINE = 180.0


def look(session: Session, wanted: Wanted, environment: Mapping[str, str]) -> Inside | Trouble:
    """`environment`: variables of a run that are no secrets. Trouble: no program runs there."""
    ask = None if wanted.gpus is None else wanted.some_gpu  # None: only where there is a trace of a GPU
    request = {"modules": list(MODULES), "environment": dict(environment), "gpus": ask}
    sent = time.time()
    try:
        answer = session.call("doctor", request, deadline=DEADLINE if ask is False else GPU_DEADLINE)
        received = time.time()
        said = Answer.model_validate_json(json.dumps(answer))
    except ValidationError as error:
        first = error.errors()[0]
        why = f"`{'.'.join(map(str, first['loc']))}`: {first['msg']}"
        return Trouble("remote_failed", "its answer makes no sense", why, "run it again; if it repeats, report it")
    except DfoError as error:
        return Trouble.of(error)
    return Inside(wanted, said, min(0.0, said.time - sent) or max(0.0, said.time - received))
