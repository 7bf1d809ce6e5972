"""How byte-level BPE vocabularies cut text into words before merging, by `tokenizer.ggml.pre`.

Each pattern in turn cuts every piece so far into its matches and what lies between them. Contractions are written out
in both cases because case folding would also take letters such as the long s.

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
_QWEN35 = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
)
# Letters beyond ASCII count as upper and as lower case.
_UPPER, _LOWER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
_GPT4O = rf"{_CASED % ((f'(?:{_SHORT})?',) * 2)}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CJK = r"[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
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
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code"
        " roberta-bpe mpt olmo jais exaone4",
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
            (r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}+"),
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
            (
                r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                r"\s*[\r\n]|\s+(?!\S)|\s+",
            ),
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
