"""Shell scripts from templates, where no value can become code.

Every `{{ value }}` is quoted by the renderer (`shlex.quote`), whoever wrote the template; a list becomes quoted
words. That is only safe where the shell expects a word, so a template with a placeholder inside quotes, a comment
or a here-document is refused before it is rendered. A name that nobody defined is an error, not an empty word.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import PurePath

import jinja2

from orchestrator.errors import UsageError

_TOKENS = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{##.*?##\}|\\.|<<<|<<|\$'|\$\(\(|\$\(|\$\{|\(\(|\)\)|.", re.DOTALL)
_WORD_ENDS = (" ", "\t", "\n", ";", "&", "|", "(")
_CLOSES = {"$(": ")", "(": ")", "((": "))", "$((": "))", "${": "}", '"': '"', "`": "`"}
_UNSAFE = {
    "#": "a comment",
    "'": "single quotes",
    '"': "double quotes",
    "`": "backticks",
    "((": "an arithmetic expression",
    "$((": "an arithmetic expression",
}
_REFUSED = {"<<": "a here-document", "$'": "ANSI-C quotes"}


def render_script(template: str, values: Mapping[str, object], *, name: str) -> str:
    """The script, with every value quoted. `name` is how messages call the template.

    Raises UsageError `template_invalid` with line number: syntax, an undefined name, an unsafe placeholder, a
    value that no shell word can hold.
    """
    _refuse_unsafe_places(template, name)
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        finalize=_word,
        # `{#` alone is bash: `${#name}`.
        comment_start_string="{##",
        comment_end_string="##}",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    try:
        return environment.from_string(template).render(values)
    except jinja2.TemplateSyntaxError as error:
        raise _invalid(f"{name}:{error.lineno}", "is no valid template", str(error.message)) from error
    except Exception as error:  # the expressions of a template are code, and may raise anything
        line = _template_line(error)
        raise _invalid(f"{name}:{line}" if line else name, "cannot be rendered", str(error)) from error


class _Unquotable(Exception):
    """A value that is no text for a shell."""


def _word(value: object) -> str:
    if isinstance(value, jinja2.Undefined):
        return str(value)  # raises, with the name
    if isinstance(value, list | tuple):
        return " ".join(_word(item) for item in value)
    if isinstance(value, bool) or not isinstance(value, str | int | float | PurePath):
        raise _Unquotable(f"{type(value).__name__} {value!r} is no shell word; give text, a number or a list of them")
    text = str(value)
    if "\0" in text or not _is_utf8(text):
        raise _Unquotable("a value holds a NUL character or broken text, which no shell word can hold")
    return shlex.quote(text)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_unsafe_places(template: str, name: str) -> None:
    """Walk over the shell text and find every placeholder that is not where a word may stand."""
    context: list[str] = []
    line, before = 1, "\n"
    for match in _TOKENS.finditer(template):
        token = match[0]
        if token.startswith("{{") and (place := _unsafe(context)):
            why = f"`{token}` stands in {place}, where a quoted value is not safe"
            raise _invalid(f"{name}:{line}", "has an unsafe placeholder", why)
        if token in _REFUSED and not _unsafe(context):
            raise _invalid(f"{name}:{line}", f"uses {_REFUSED[token]}", "values near it could not be kept safe")
        if not token.startswith(("{{", "{%", "{##")):
            _enter_or_leave(context, token, before)
        before = token
        line += token.count("\n")


def _unsafe(context: list[str]) -> str | None:
    """What makes this a bad place for a value; a command substitution starts afresh inside quotes."""
    for opened in reversed(context):
        if opened in _UNSAFE:
            return _UNSAFE[opened]
        if opened in {"$(", "("}:
            return None
    return None


def _enter_or_leave(context: list[str], token: str, before: str) -> None:
    inside = context[-1] if context else ""
    if token == "))" and inside not in {"((", "$(("}:
        _enter_or_leave(context, ")", before)
        _enter_or_leave(context, ")", ")")
    elif inside in {"'", "#"}:
        # A backslash escapes nothing here, so a pair counts as its second half.
        if token[-1] == ("\n" if inside == "#" else "'"):
            context.pop()
    elif token == _CLOSES.get(inside):
        context.pop()
    elif token in {"$(", "${", '"', "`"} or (inside != '"' and token in {"'", "(", "((", "$(("}):
        context.append(token)
    elif token == "#" and inside != '"' and before in _WORD_ENDS:
        context.append("#")


def _template_line(error: Exception) -> int | None:
    """The template's own line, which jinja2 puts into the traceback."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _invalid(where: str, what: str, why: str) -> UsageError:
    return UsageError(
        "template_invalid",
        f"{where} {what}",
        why=why,
        fix="correct the template: a placeholder stands alone as a word, and its value comes quoted",
    )
