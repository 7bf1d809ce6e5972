"""Chat templates: the texts of the references, the sandbox, and clear errors."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from real_models import real_model

pytest.importorskip("jinja2", reason="needs the extra llm")
pytest.importorskip("tokenizers", reason="needs the extra llm")

from ggjit.gguf import GgufFile
from ggjit.llm.chat import render
from ggjit.llm.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data" / "vocab"
TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]


def speaker(template: str) -> SimpleNamespace:
    """As much of a tokenizer as a template needs."""
    return SimpleNamespace(chat_template=template, bos=0, eos=-1, piece=lambda id: b"<s>")


def test_small_model():
    tokenizer = Tokenizer.from_gguf(GgufFile(DATA / "qwen2.gguf"))
    cases = json.loads((DATA / "qwen2.json").read_text(encoding="utf-8"))["chat"]
    for case in cases if isinstance(cases, list) else [cases]:
        assert render(tokenizer, case["messages"]) == case["rendered_c_api"]
    assert render(tokenizer, TALK[:1], add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_smollm2(reference):
    tokenizer = Tokenizer.from_gguf(GgufFile(real_model("SmolLM2-135M-Instruct.Q4_1.gguf")))
    facts = json.loads((reference / "models/real/smollm2-135m-instruct.json").read_text(encoding="utf-8"))
    assert len(facts["chats"]) >= 2
    for chat in facts["chats"]:
        text = render(tokenizer, chat["messages"])
        assert text == chat["rendered"]
        assert tokenizer.tokenize(text, add_special=False) == chat["ids"]


def test_what_templates_get():
    template = """
    {%- for message in messages %}
        {% if message.role == 'assistant' %}
{% generation %}A:{{ message.content }}{% endgeneration %}

        {% else %}
{{ loop.index }}:{{ message['content'] }}
        {% endif %}
        {% if loop.index == 2 %}{% break %}{% endif %}
    {% endfor %}
{{ bos_token }}|{{ eos_token }}|{{ add_generation_prompt }}|{{ tools }}|{{ extra }}|{{ {'ä': [1, "<"]} | tojson }}"""
    text = render(speaker(template), TALK, extra=7)
    assert text == '1:Hi\nA:Hello\n<s>||True|None|7|{"ä": [1, "<"]}'
    assert render(speaker("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}"), []) == '{\n "a": 2,\n "b": 1\n}'
    year = render(speaker("{{ strftime_now('%Y') }}"), [])
    assert abs(int(year) - datetime.datetime.now().year) <= 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "must have a chat template (tokenizer.chat_template), got none"),
        ("\n{% if %}", "must be valid Jinja, got line 2: "),
        ("{{ raise_exception('no system role') }}", "must accept the messages, got no system role"),
        ("{{ messages[0].content + 1 }}", "must accept the messages, got can only concatenate"),
        ("{{ nothing.at.all }}", "must accept the messages, got 'nothing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(a=1) }}", "unsafe"),
        ("{{ 1 // 0 }}", "must accept the messages, got integer division"),
    ],
)
def test_errors(template, message):
    talk = [dict(one) for one in TALK]
    with pytest.raises(ValueError) as caught:
        render(speaker(template), talk)
    assert str(caught.value).startswith("chat: ") and message in str(caught.value)
    assert talk == TALK
