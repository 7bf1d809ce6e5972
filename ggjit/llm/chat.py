"""Conversations as text, by the chat template that a model brings along (`tokenizer.chat_template`).

Templates are Jinja programs written by whoever made the file, so they run in Jinja's immutable sandbox. They get what
the `transformers` library gives them: `messages`, `tools`, `documents`, `add_generation_prompt`, `bos_token`,
`eos_token`, the functions `raise_exception` and `strftime_now`, a `tojson` that leaves letters as they are, loop
controls, and the `generation` tag (which marks what a model said and prints it).

Source: `apply_chat_template` of transformers.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ggjit.arguments import check_kinds
from ggjit.extras import how_to_install

if TYPE_CHECKING:
    import jinja2

    from ggjit.llm.tokenizer import Tokenizer

__all__ = ["render"]


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


@functools.cache
def _environment() -> jinja2.Environment:
    try:
        import jinja2.ext
        import jinja2.sandbox
    except ModuleNotFoundError as error:
        hint = f"chat: chat templates need the package jinja2; {how_to_install('jinja2')}"
        raise ModuleNotFoundError(hint, name=error.name) from None

    class Generation(jinja2.ext.Extension):
        """`{% generation %} ... {% endgeneration %}`: what stands between them."""

        tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=_strftime_now)
    return environment


@functools.lru_cache(16)
def _compile(source: str) -> jinja2.Template:
    import jinja2

    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"chat: the chat template must be valid Jinja, got line {error.lineno}: {error.message}"
        ) from None


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    tools: Sequence[Any] | None = None,
    **variables: Any,
) -> str:
    """Write a conversation as the text that the model was trained on.

    The text holds its special tokens: tokenize it with `add_special=False, parse_special=True`.

    Args:
        tokenizer: of the model, for the template and the texts of BOS and EOS.
        messages: mappings with `role` and `content`, oldest first.
        add_generation_prompt: end with the beginning of the model's answer.
        tools: descriptions of functions, for templates that know them.
        variables: more names for the template.

    Returns:
        The text.

    Raises:
        TypeError: the messages are no mappings.
        ValueError: the model has no template, or it refuses the conversation.
        ModuleNotFoundError: Jinja is not installed.
    """
    given: Any = messages
    is_text = isinstance(given, (str, bytes))  # a sequence too
    check_kinds("chat", () if is_text else Sequence, "a list of messages", messages=given)
    for i, message in enumerate(messages):
        check_kinds("chat", Mapping, "a mapping with role and content", **{f"messages[{i}]": message})
    if not tokenizer.chat_template:
        raise ValueError(
            "chat: the model must have a chat template (tokenizer.chat_template), got none; use a plain prompt"
        )
    template = _compile(tokenizer.chat_template)
    import jinja2

    names = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "tools": tools,
        "documents": None,
        "bos_token": _text(tokenizer, tokenizer.bos),
        "eos_token": _text(tokenizer, tokenizer.eos),
    }
    try:
        return template.render(**names | variables)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"chat: the chat template must accept the messages, got {reason}") from None


def _text(tokenizer: Tokenizer, id: int) -> str:
    return tokenizer.piece(id).decode("utf-8", "replace") if id >= 0 else ""
