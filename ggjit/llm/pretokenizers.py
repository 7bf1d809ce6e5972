"""How byte-level BPE vocabularies cut text into words before merging, by `tokenizer.ggml.pre`.

Each pattern in turn cuts every piece so far into its matches and what lies between them. Contractions are written out
in both cases because case folding would also take letters such as the long s.

The library knows the letters and digits of Unicode 15; those that Unicode 16 added count as other signs.

Source: the `tokenizer.json` files of the models; names as llama.cpp writes them.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PRE_TOKENIZERS", "PreTokenizer"]


class PreTokenizer(NamedTuple):
    """What a pre-tokenizer kind means.

    Attributes:
        patterns: regular expressions, applied one after the other.
        clean_spaces: detokenizing drops the blanks before punctuation and contractions.
        ignore_merges: a word that is a token is taken as it is, whatever the merges say.
        add_bos: texts begin with the BOS token unless the file says otherwise.
        bos: whether there is a BOS token if the file names none.
    """

    patterns: tuple[str, ...]
    clean_spaces: bool = True
    ignore_merges: bool = False
    add_bos: bool = False
    bos: bool = True


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SHORT = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(letters: str = r"[^\r\n\p{L}\p{N}]?\p{L}+", digits: str = r"\p{N}", rest: str = r"[\r\n]*") -> str:
    """The pattern of the Llama 3 family: contractions, letters, digits, other signs, blanks."""
    return rf"{_SHORT}|{letters}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{rest}|{_BLANKS}"


_LLAMA3 = _words(digits=r"\p{N}{1,3}")
_QWEN2 = _words()
_QWEN35 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
# Letters beyond ASCII count as upper and as lower case.
_UPPER, _LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
_GPT4O = rf"{_CASED % ((f'(?:{_SHORT})?',) * 2)}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
_BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]|\s+(?!\S)|\s+"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CJK = r"(?:(?!\s)[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}])+"
# Letters that have a case. As numbers, because some have a canonical form that is another character.
_DEEPSEEK_LETTERS = (
    r"A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}\x{295}-\x{2af}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}\x{38c}\x{38e}-\x{3a1}\x{3a3}-\x{3f5}"
    r"\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}\x{13a0}-\x{13f5}\x{13f8}-\x{13fd}"
    r"\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15}"
    r"\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}\x{1f5f}-\x{1f7d}"
    r"\x{1f80}-\x{1fb4}\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}"
    r"\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}"
    r"\x{2124}\x{2126}\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}"
    r"\x{2183}\x{2184}\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}"
    r"\x{a680}-\x{a69b}\x{a722}-\x{a76f}\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}\x{fb00}-\x{fb06}"
    r"\x{fb13}-\x{fb17}\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}"
    r"\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
_DEEPSEEK_SIGNS = r"!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3001}-\x{3002}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _BLANKS,
)

_KINDS: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "default",
        PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    ),
    (
        """
        gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code
        roberta-bpe mpt olmo jais exaone4
        """,
        PreTokenizer((_GPT2,)),
    ),
    ("trillion granite-docling", PreTokenizer((_GPT2,), clean_spaces=False)),
    ("starcoder refact codeshell exaone minerva-7b mellum2", PreTokenizer((r"\p{N}", _GPT2))),
    ("smollm command-r", PreTokenizer((r"\p{N}", _GPT2), clean_spaces=False)),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe", PreTokenizer((_LLAMA3,))),
    ("glm4 chatglm-bpe", PreTokenizer((_LLAMA3,), bos=False)),
    ("stablelm2 megrez", PreTokenizer((_QWEN2,))),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 hunyuan solar-open grok-2", PreTokenizer((_QWEN2,), clean_spaces=False)),
    ("qwen35", PreTokenizer((_QWEN35,), clean_spaces=False)),
    (
        "minicpm5",
        PreTokenizer((r"\p{N}{1,3}", _words(digits=r"\p{N}+")), ignore_merges=True),
    ),
    (
        "falcon",
        PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    ),
    ("bloom gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("poro-chat", PreTokenizer((_BLOOM,), clean_spaces=False)),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"), clean_spaces=False)),
    ("tekken", PreTokenizer((_TEKKEN,), clean_spaces=False, ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,), clean_spaces=False)),
    (
        "deepseek-coder",
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"), clean_spaces=False),
    ),
    (
        "deepseek-llm",
        PreTokenizer(
            (r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", rf"\s?[{_DEEPSEEK_SIGNS}]+", r"\s+$", _CJK, r"\p{N}+"),
            clean_spaces=False,
        ),
    ),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(_DEEPSEEK3, clean_spaces=False)),
    (
        "seed-coder",
        PreTokenizer(
            (rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",),
            clean_spaces=False,
        ),
    ),
    (
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer(
            (_BAILING,),
            clean_spaces=False,
        ),
    ),
    (
        "ufakzeka",
        PreTokenizer(
            (rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}",), clean_spaces=False
        ),
    ),
    ("laguna", PreTokenizer((r"[^\n]+|[\n]+", _QWEN2), clean_spaces=False)),
    (
        "chameleon",
        PreTokenizer(
            (
                r"<sentinel:[0-9]+>",
                r"(?:IMGIMG)(?:(?:A|B|C|D|E|F|G|H|I){1,4})Z",
                r"[\t\n]|    |  ",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            clean_spaces=False,
            add_bos=True,
        ),
    ),
)

# Kind by each of its names.
PRE_TOKENIZERS = {name: kind for names, kind in _KINDS for name in names.split()}
