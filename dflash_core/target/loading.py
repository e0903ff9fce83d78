"""Loading the frozen target and its tokenizer from local files."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as _transformers_logging

from dflash_core.cache_folder import cache_folder
from dflash_core.config import TargetConfig, resolve_path
from dflash_core.errors import TargetError
from dflash_core.target.model import Target

log = logging.getLogger(__name__)
hf_logging: Any = _transformers_logging

_LOAD_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    RuntimeError,
    ImportError,
    AttributeError,
    TypeError,
    SafetensorError,
)
"""What transformers and its readers raise for damaged, incomplete or unknown model files."""

_from_pretrained_lock = threading.Lock()
"""Transformers swaps torch's default dtype and init functions while it loads, for all threads at once."""


def load_target(config: TargetConfig, device: str | torch.device = "cpu", *, dtype: str | None = None) -> Target:
    """Load the target frozen, in `dtype` (default: `config.dtype`), onto `device`; nothing is downloaded.

    GGUF weights are dequantised once, in fp32, into the cache folder and read from there from then on: parsing a
    GGUF takes longer than everything else about a small model. Raises `TargetError`.
    """
    folder = _checked_folder(config)
    torch_dtype = getattr(torch, dtype or config.dtype)
    with _loading(config):
        if config.gguf_file is not None:
            folder = _dequantised_copy(folder, config.gguf_file)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype, local_files_only=True)
    return Target(model.to(device))


def load_target_config(config: TargetConfig) -> Any:
    """The target's transformers configuration, without reading its weights. Raises `TargetError`."""
    folder = _checked_folder(config)
    with _loading(config):
        if config.gguf_file is not None:
            folder = _dequantised_copy(folder, config.gguf_file)
        return AutoConfig.from_pretrained(folder, local_files_only=True)


def load_tokenizer(config: TargetConfig) -> Any:
    """Load the target's tokenizer, with `config.chat_template` (a Jinja file) in place of its own if set.

    Raises `TargetError`, also when there is no chat template at all.
    """
    folder = _checked_folder(config)
    with _loading(config):
        if config.gguf_file is not None:
            folder = _dequantised_copy(folder, config.gguf_file)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if config.chat_template is not None:
        tokenizer.chat_template = _read_template(config.chat_template)
    if not tokenizer.chat_template:
        raise TargetError(
            f"the tokenizer in {folder} has no chat template",
            "chats are turned into the target's own prompt format with it",
            "set target.chat_template to a Jinja file, or use the instruct version of the model",
        )
    return tokenizer


def _checked_folder(config: TargetConfig) -> Path:
    folder = resolve_path(config.path)
    wanted = config.gguf_file or "config.json"
    if not (folder / wanted).is_file():
        raise TargetError(
            f"target.path {folder}: there is no {wanted} in it" if folder.is_dir() else f"no folder {folder}",
            "the target is read from local files only",
            "point target.path to a folder in Hugging Face format, or set target.gguf_file to a GGUF inside it",
        )
    if config.gguf_file is not None:
        missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
        if missing:
            raise TargetError(
                f"reading {config.gguf_file} needs the missing packages {' and '.join(missing)}",
                "GGUF weights are dequantised through transformers, which imports them",
                f"pip install {' '.join(missing)}",
            )
    return folder


@contextmanager
def _loading(config: TargetConfig) -> Iterator[None]:
    """One load at a time, without progress bars, with the many errors of a broken model folder made one."""
    bars = hf_logging.is_progress_bar_enabled()
    with _from_pretrained_lock:
        hf_logging.disable_progress_bar()
        try:
            yield
        except _LOAD_ERRORS as error:
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            fix = "check that the files are complete and that this transformers version knows the architecture"
            if config.gguf_file is not None:
                fix += f", and that {cache_folder('dequantised')} can hold an fp32 copy (DFLASH_CACHE_DIR moves it)"
            raise TargetError(
                f"cannot load the target from {config.path}: {first_line}",
                f"transformers {transformers.__version__} raised {type(error).__name__}",
                fix,
            ) from error
        finally:
            if bars:
                hf_logging.enable_progress_bar()


def _read_template(path: str) -> str:
    try:
        return resolve_path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TargetError(
            f"target.chat_template {path} cannot be read: {error}",
            "it must be a UTF-8 text file with a Jinja template",
            "correct the path, or leave target.chat_template out to use the tokenizer's own",
        ) from error


def _dequantised_copy(folder: Path, gguf_file: str) -> Path:
    """The folder with model and tokenizer as plain fp32 files, written on first use. May raise `OSError`."""
    source = (folder / gguf_file).resolve()
    stat = source.stat()
    key = f"{source}:{stat.st_size}:{stat.st_mtime_ns}:{transformers.__version__}"
    copy = cache_folder("dequantised") / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if not copy.is_dir():
        log.info("dequantising %s into %s (once)", source, copy)
        copy.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(copy.parent)
        partial = Path(tempfile.mkdtemp(prefix=f".{copy.name}.", dir=copy.parent))
        try:
            _dequantise(folder, gguf_file, partial)
            _move_into_place(partial, copy)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return copy


def _remove_abandoned(folder: Path) -> None:
    """Partial copies of processes that were killed; a day is longer than any dequantisation takes."""
    for partial in folder.glob(".*"):
        if partial.stat().st_mtime < time.time() - 86_400:
            shutil.rmtree(partial, ignore_errors=True)


def _dequantise(folder: Path, gguf_file: str, into: Path) -> None:
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        # Newer versions keep GGUF blocks packed where they have a kernel for them; the head must be a plain matrix.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=gguf_file, dtype=torch.float32, local_files_only=True, **options
    )
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(into)
    AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file, local_files_only=True).save_pretrained(into)


def _move_into_place(partial: Path, copy: Path) -> None:
    try:
        partial.rename(copy)
    except OSError:
        # Another process finished the same copy first; its files are as good as ours.
        if not copy.is_dir():
            raise
