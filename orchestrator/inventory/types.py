"""What single values of the inventory may be: patterns, checked text, durations and sizes, secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
)

from orchestrator.inventory.secrets import Secret
from orchestrator.inventory.units import DURATION_PATTERN, SIZE_PATTERN, parse_duration, parse_size

# A letter first: on the command line a word of digits is a run.
NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9._-]{0,62}$"
VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
DEVICE_PATTERN = r"^(cpu|cuda:[0-9]+)$"
PYTHON_PATTERN = r"^3\.[0-9]+$"
FINGERPRINT_PATTERN = r"^SHA256:[A-Za-z0-9+/]{43}$"
CERTIFICATE_PATTERN = r"^(SHA256:)?([0-9A-Fa-f]{2}:?){31}[0-9A-Fa-f]{2}$"
TOKEN_ID_PATTERN = r"^[^@!\s]+@[A-Za-z][A-Za-z0-9._-]+![A-Za-z][A-Za-z0-9._-]+$"
HOP_PATTERN = r"^([^@\s-][^@\s]*@)?(\[[0-9A-Fa-f:.]+\]|[^@:\s\[\],/-][^@:\s\[\],/]*)(:[0-9]{1,5})?$"
HOST_PATTERN = r"^[^@\s,/-][^@\s,/]*$"
USER_PATTERN = r"^[^@\s:-][^@\s:]*$"
ABSOLUTE_PATTERN = r"^/[^\n\x00]*$"
#: What each pattern asks for, in words.
PATTERN_WORDS = {
    NAME_PATTERN: "of letters, digits, `.`, `_` and `-`, beginning with a letter",
    VARIABLE_PATTERN: "the name of a variable",
    DEVICE_PATTERN: "`cpu`, `cuda:N` or the number of a GPU",
    PYTHON_PATTERN: 'a Python version such as "3.11"',
    FINGERPRINT_PATTERN: "`SHA256:` and 43 characters, as `ssh-keygen -lf` prints them",
    CERTIFICATE_PATTERN: "a SHA-256 fingerprint of 64 hexadecimal digits, as `pvenode cert info` prints it",
    TOKEN_ID_PATTERN: "USER@REALM!NAME, as `pveum user token list` has it",
    HOP_PATTERN: "a host such as bastion, ada@bastion:2222 or ada@[2001:db8::1]:22",
    HOST_PATTERN: "a name, an address or a Host alias, without user and port",
    USER_PATTERN: "the name of a user",
    ABSOLUTE_PATTERN: "an absolute path",
}
PLACEHOLDERS = frozenset({"run", "target"})


def _inside(text: str) -> str:
    parts = text.split("/")
    if text.startswith(("/", "~")) or ".." in parts or "\\" in text or not text:
        raise ValueError("must be a relative path without `..`")
    return text


def _placeholders(text: str) -> str:
    unknown = set(re.findall(r"\{([^{}]*)\}", text)) - PLACEHOLDERS
    if unknown or text.count("{") != text.count("}"):
        raise ValueError("may hold the placeholders {run} and {target}, no others")
    return text


def _device(value: object) -> object:
    """A bare number is a GPU: 3 means `cuda:3`."""
    return f"cuda:{value}" if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else value


def _unique(values: list[int]) -> list[int]:
    if len(set(values)) != len(values):
        raise ValueError("must not name a GPU twice")
    return values


def _unique_stages(values: list[str]) -> list[str]:
    if not values or len(set(values)) != len(values):
        raise ValueError("must name at least one stage, and none twice")
    return values


def _env_value(value: object) -> str | Secret:
    """Text stays text; a mapping with one key says where a secret is."""
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError("must not contain a NUL character")
        return value
    if not isinstance(value, Mapping):
        raise ValueError('must be text (quote it: "0") or a secret such as {env: NAME}')
    return _secret(value)


def _secret(value: object) -> Secret:
    """A mapping with one key; the secret itself has no place in an inventory."""
    if isinstance(value, Mapping) and len(value) == 1:
        match dict(value):
            case {"env": str(name)} if re.match(VARIABLE_PATTERN, name):
                return Secret(env=name)
            case {"file": str(path)} if path:
                return Secret(file=path)
            case {"command": [str(), *_] as words} if all(isinstance(word, str) for word in words):
                return Secret(command=tuple(words))
    raise ValueError("must be a secret, one of {env: NAME}, {file: PATH}, {command: [PROGRAM, ARGUMENT, …]}")


def _nothing(value: object) -> object:
    """A section with every line commented out is the same as none."""
    return {} if value is None else value


EMPTY = BeforeValidator(_nothing)
Duration = Annotated[
    float, PlainValidator(parse_duration), WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN})
]
Size = Annotated[int, PlainValidator(parse_size), WithJsonSchema({"type": "string", "pattern": SIZE_PATTERN})]
_SECRET_SCHEMA = [
    {"type": "object", "properties": {key: kind}, "required": [key], "additionalProperties": False}
    for key, kind in (
        ("env", {"type": "string"}),
        ("file", {"type": "string"}),
        ("command", {"type": "array", "items": {"type": "string"}, "minItems": 1}),
    )
]
EnvValue = Annotated[
    str | Secret,
    PlainValidator(_env_value),
    WithJsonSchema({"anyOf": [{"type": "string"}, *_SECRET_SCHEMA]}),
]
SecretValue = Annotated[Secret, PlainValidator(_secret), WithJsonSchema({"anyOf": _SECRET_SCHEMA})]
Stage = Literal["generate", "preflight", "train", "evaluate", "export"]
Stages = Annotated[list[Stage], AfterValidator(_unique_stages)]
Gpus = Annotated[list[Annotated[int, Field(ge=0)]], AfterValidator(_unique)]
Text = Annotated[str, StringConstraints(min_length=1)]
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Variable = Annotated[str, StringConstraints(pattern=VARIABLE_PATTERN)]
InsidePath = Annotated[str, AfterValidator(_inside)]
PlacedPath = Annotated[InsidePath, AfterValidator(_placeholders)]
PlacedText = Annotated[Text, AfterValidator(_placeholders)]
PythonVersion = Annotated[str, StringConstraints(pattern=PYTHON_PATTERN)]
Port = Annotated[int, Field(ge=1, le=65535)]
Fingerprint = Annotated[str, StringConstraints(pattern=FINGERPRINT_PATTERN)]
CertificateFingerprint = Annotated[str, StringConstraints(pattern=CERTIFICATE_PATTERN)]
TokenId = Annotated[str, StringConstraints(pattern=TOKEN_ID_PATTERN)]
HopText = Annotated[str, StringConstraints(pattern=HOP_PATTERN)]
Host = Annotated[str, StringConstraints(pattern=HOST_PATTERN)]
User = Annotated[str, StringConstraints(pattern=USER_PATTERN)]
AbsolutePath = Annotated[str, StringConstraints(pattern=ABSOLUTE_PATTERN)]
Device = Annotated[
    str,
    BeforeValidator(_device),
    StringConstraints(pattern=DEVICE_PATTERN),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}),
]


class Section(BaseModel):
    """A mapping of the inventory."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)
