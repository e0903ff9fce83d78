"""The one place where the environment of a run is set: cache folders and compile configuration.

torch's compile configuration is per thread since 2.12 (what main sets is not seen by a worker) and shared by
the process before. So whatever has an environment variable is set there, before torch is imported, and the
rest in each thread that runs torch code.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

from dflash_core.cache_folder import cache_folder
from dflash_core.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

# Variables whose mere presence would hide a compile error: torch reads any non-empty text as "on".
_REMOVED = ("TORCHDYNAMO_SUPPRESS_ERRORS",)
_DISABLING = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
_NOT_CACHING = ("TORCHINDUCTOR_FORCE_DISABLE_CACHES",)
_DYNAMO_OPTIONS = (
    "automatic_dynamic_shapes",
    "assume_static_by_default",
    "recompile_limit",
    "fail_on_recompile_limit_hit",
    "suppress_errors",
)
_OPTION_PREFIXES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_", "TORCH_DYNAMO_", "TRITON_")
# Where things are kept and how many processes compile does not change what is compiled.
_NO_OPTIONS = re.compile(r".*_(DIR|HOME|COMPILE_THREADS|WORKER_START)")


def compile_home() -> Path:
    """Where compile caches live unless told otherwise: one folder per set of compilers.

    For example `shared/cache/compile/py3.12-torch2.11.0-triton3.6.0`. torch and Triton have their own version in every
    key, so caches of two versions would not disturb each other in one folder. Apart, one of them can be measured,
    moved and removed as a whole; and the path stays the same from release to release, as compiled code may hold it.
    No import of torch is needed to know it.
    """
    versions = [f"py{sys.version_info[0]}.{sys.version_info[1]}"]
    for name in ("torch", "triton"):
        try:
            versions.append(name + importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return cache_folder("compile") / re.sub(r"[^A-Za-z0-9.+-]", "_", "-".join(versions))


def compile_options(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables in force that change what is compiled. Take them before the first compile, which may set some."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(_OPTION_PREFIXES) and not _NO_OPTIONS.fullmatch(name)
    }


def variables(cache_dir: Path) -> dict[str, str]:
    """The environment variables of a run whose compile caches live under `cache_dir`.

    Both caches get a folder of their own: left to itself, Inductor picks a Triton folder per device and
    writes it to the environment of the process. Profile-guided shapes are off because they make a graph
    depend on which thread came first in an earlier run. Idle OpenMP threads sleep: by default they spin, and the
    pools of target and drafter threads then take the cores from each other (a step of both on two cores: 2.5 s
    spinning, 1.1 s sleeping; a drafter alone: no difference).
    """
    root = Path(os.path.abspath(cache_dir))  # noqa: PTH100 - resolve() would follow a link that moves
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(root / "inductor"),
        "TRITON_CACHE_DIR": str(root / "triton"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_SHAPES": "0",
        "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO": "0",
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def prepare_process(
    cache_dir: Path, environ: MutableMapping[str, str] = os.environ, *, create: bool = True
) -> dict[str, str]:
    """Set the variables of a run, before torch is imported, and `create` the cache folders.

    A variable that is already set keeps its value, so the launcher or the user decides where caches live.
    Returns what is in force.
    """
    for name in _REMOVED:
        environ.pop(name, None)
    wanted = variables(cache_dir)
    for name, value in wanted.items():
        environ.setdefault(name, value)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR") if create else ():
        Path(environ[name]).mkdir(parents=True, exist_ok=True)
    return {name: environ[name] for name in wanted}


def configure_main(*, recompile_limit: int = 16) -> None:
    """Once, in the main thread, after torch is imported and before workers start."""
    import torch

    # In a CUDA build without a GPU the stand-in device guard belongs to the first thread that traces; when
    # that thread has ended, the next trace crashes the process (seen with 2.11).
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if ensure is not None and not torch.cuda.is_available():
        ensure()
    configure_thread(recompile_limit=recompile_limit)


def configure_thread(*, recompile_limit: int = 16) -> None:
    """At the start of every thread that runs torch code: few static shapes, and no silent way out.

    Past `recompile_limit` graphs of one code object Dynamo would run eagerly without a word, which for
    attention means dense scores; here it raises instead.
    """
    import torch._dynamo.config as dynamo

    dynamo.automatic_dynamic_shapes = False
    dynamo.assume_static_by_default = True
    dynamo.recompile_limit = recompile_limit
    dynamo.fail_on_recompile_limit_hit = True
    dynamo.suppress_errors = False


def require_compiling() -> None:
    """Raise `ConfigError` when a variable switches compiling off, or switches CUDA graphs on.

    CUDA graphs keep their pools and their capture state per thread (pytorch issue 123177), and worker threads
    are what runs here; the gate refuses a recording as well, but only after the models have been loaded.
    """
    if _is_on("TORCHINDUCTOR_CUDAGRAPHS"):
        raise ConfigError(
            "CUDA graphs cannot be used by worker threads",
            "torch keeps their memory pools and capture state per thread",
            "unset TORCHINDUCTOR_CUDAGRAPHS",
        )
    if disabled := [name for name in _DISABLING if _is_on(name)]:
        raise ConfigError(
            "compiling is switched off",
            "uncompiled, this attention would hold every score in memory",
            f"unset {' and '.join(disabled)}, or set train.attention to auto",
        )


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def describe(cache_dir: Path) -> dict[str, Any]:
    """What is in force in this process and this thread, for the record of the run.

    Keys: `variables` (name to value, None where unset), `disabled` (variables that switch compiling or
    caching off), `dynamo` (options of the calling thread; None before Dynamo is imported), `torch` (version
    or None).
    """
    dynamo = sys.modules.get("torch._dynamo.config")
    torch_module = sys.modules.get("torch")
    return {
        "torch": None if torch_module is None else torch_module.__version__,
        "variables": {name: os.environ.get(name) for name in variables(cache_dir)} | compile_options(),
        "disabled": [name for name in (*_DISABLING, *_NOT_CACHING) if _is_on(name)],
        "dynamo": None if dynamo is None else {name: getattr(dynamo, name) for name in _DYNAMO_OPTIONS},
    }


def clone_code(fn: F) -> F:
    """A copy of the function `fn` with a code object of its own.

    Dynamo keeps compiled graphs and the recompile limit per code object, for all threads and devices
    together. Each worker compiles its own clone, so its graphs do not depend on the other workers.
    Functions that `fn` calls keep theirs.

    Raises:
        TypeError: `fn` is not a plain Python function.
    """
    if not isinstance(fn, FunctionType):
        raise TypeError(f"clone_code needs a plain Python function, got {type(fn).__name__}")
    clone = FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    clone.__kwdefaults__ = fn.__kwdefaults__
    clone.__annotations__ = fn.__annotations__
    clone.__qualname__ = fn.__qualname__
    clone.__module__ = fn.__module__
    clone.__doc__ = fn.__doc__
    clone.__dict__.update(fn.__dict__)
    return clone  # type: ignore[return-value]
