"""SmolLM2-135M-Instruct, where `ggjit pull smollm2` has fetched it (or GGJIT_MODELS names its folder)."""

import re
from pathlib import Path

import pytest
from real_models import real_model

import ggjit as gg

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "The capital of France is"
CONTINUATION = (
    " Paris.\n\nThe"  # as llama.cpp goes on; then its best two tokens are 0.03 apart, less than int8 rounding
)


@pytest.fixture(scope="module")
def path():
    return real_model(NAME)


def test_readme_s_prompt_is_continued(path):
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    command = re.search(r"<!-- run -->.*?-p \"(.*?)\" -n (\d+) --temp 0", readme, re.S)
    assert command is not None
    assert command.groups() == (PROMPT, "16")
    with gg.LLM(path, n_ctx=256, progress=False) as llm:
        text = "".join(llm.generate(PROMPT, 16, temperature=0))
        assert text.startswith(CONTINUATION) and len(llm.tokenize(text)) >= 16
        ids = llm.tokenize(PROMPT)
        whole = llm.logits(ids)
    with gg.LLM(path, n_ctx=256, n_threads=1, n_ubatch=2, progress=False) as llm:
        assert (llm.logits(ids) == whole).all(), "threads and batches must not change a bit"
