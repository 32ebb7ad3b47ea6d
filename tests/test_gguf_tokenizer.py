"""The tokenizers of GGUF files: what llama.cpp printed for the same files, or the model's publisher says."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from pearl.cache import silent
from pearl.errors import ModelError
from pearl.models.checkpoints.gguf import directory_of, read_header
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.text.gguf_tokenizer import tokenizer_of
from pearl.text.tokenizer import FileTokenizer, check_same_vocabulary

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
TEXT = 'It\'sa é  12345\n\n \txY="`$"中文。/\r\n'


def write(file: Path, model: str, tokens: dict[str, int] | list[str], **said: Any) -> None:
    """A file with nothing but a tokenizer. `tokens`: their texts, and kinds."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list([*tokens])
    if isinstance(tokens, dict):
        writer.add_token_types([*tokens.values()])
    for name, value in said.items():
        if value is None:
            continue
        add = {
            str: writer.add_string,
            int: writer.add_uint32,
            bool: writer.add_bool,
            list: writer.add_array,
        }
        add[type(value)](name if "." in name else f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def read(file: Path) -> tuple[Any, list[int]]:
    """As transformers uses it."""
    tokenizer, settings, ends = tokenizer_of(read_header(file)[0])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings), ends


def parts_of(text: str) -> tuple[list[str], list[str]]:
    """Tokens and merges by which any part of `text` that is not split becomes one token."""
    ((whole, _),) = tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(
        text
    )
    size = len(whole)
    parts = dict.fromkeys(
        whole[start : start + length] for length in range(2, size + 1) for start in range(size)
    )
    parts = [part for part in parts if len(part) > 1]
    return parts, [f"{part[:cut]} {part[cut:]}" for part in parts for cut in range(1, len(part))]


PIECES = {  # of TEXT, as llama.cpp cuts it
    "gpt-2": 'It|\'s|a| é| | 12345|\n\n |\t|xY|="`$"|中文|。/|\r\n',
    "starcoder smollm": 'It|\'s|a| é|  |1|2|3|4|5|\n\n |\t|xY|="`$"|中文|。/|\r\n',
    "default": 'It|\'|sa| é| | |123|45|\n\n |\t|xY|="|`|$"|中文|。/|\r\n',
    "viking": 'It\'sa| é| | |1|2|3|4|5|\n\n \t|xY="`$"中文|。|/|\r\n',
    "llama-bpe glm4 dbrx": 'It|\'s|a| é| | |123|45|\n\n| |\txY|="`$"|中文|。/\r\n',
    "qwen2 stablelm2": 'It|\'s|a| é| | |1|2|3|4|5|\n\n| |\txY|="`$"|中文|。/\r\n',
    "seed-coder": 'It|\'s|a| é| | |1|2|3|4|5|\n\n| |\txY|="`$"|中文|。/|\r\n',
    "ufakzeka": 'It|\'sa| é| | |1|2|3|4|5|\n\n| |\txY|="`$"|中文|。/\r\n',
    "tekken": 'It|\'sa| é| | |1|2|3|4|5|\n\n| |\tx|Y|="`$"|中文|。/\r\n',
    "gpt-4o minimax-m2": 'It\'s|a| é| | |123|45|\n\n| |\tx|Y|="`$"|中文|。/\r\n',
    "deepseek-llm": 'It|\'|sa| é|  |12345|\n|\n| |\txY|="`$"|中文|。|/|\r|\n',
    "deepseek-coder": 'It|\'|sa| é|  |1|2|3|4|5|\n|\n| |\txY|=|"|`$|"|中文|。|/|\r|\n',
}


@pytest.mark.parametrize(
    ("name", "pieces"), [(name, PIECES[names]) for names in PIECES for name in names.split()]
)
def test_texts_are_split_as_the_pre_tokenizer_says(tmp_path: Path, name: str, pieces: str) -> None:
    """All that transformers does not know were split as GPT-2's."""
    parts, merges = parts_of(TEXT)
    tokens = dict.fromkeys([*ALPHABET, *parts], NORMAL)
    write(tmp_path / "tiny.gguf", "gpt2", tokens, pre=name, merges=merges, bos_token_id=0)
    tokenizer, _ = read(tmp_path / "tiny.gguf")
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert "|".join(tokenizer.decode([id]) for id in ids) == pieces


def test_a_word_that_is_a_token_is_looked_up_before_it_is_merged(tmp_path: Path) -> None:
    """Of Llama 3 and its kin, whose rarer words no merges lead to."""
    tokens = dict.fromkeys([*ALPHABET, "ab", "abc"], NORMAL)
    for name, wanted in (("llama-bpe", ["abc"]), ("tekken", ["abc"]), ("gpt-2", ["ab", "c"])):
        write(
            file := tmp_path / f"{name}.gguf",
            "gpt2",
            tokens,
            pre=name,
            merges=["a b"],
            bos_token_id=0,
        )
        assert read(file)[0].tokenize("abc") == wanted


BOS, EOS, USER = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>"


def write_deepseek(file: Path, **said: Any) -> None:
    usual = {
        "model": "gpt2",
        "tokens": dict.fromkeys([*ALPHABET, "ab"], NORMAL)
        | {BOS: CONTROL, EOS: CONTROL, USER: USER_DEFINED, "[PAD260]": 5},
        "pre": "deepseek-llm",
        "merges": ["a b"],
        "bos_token_id": 257,
        "eos_token_id": 258,
        "padding_token_id": 258,
    }
    write(file, **usual | said)


def save(file: Path, directory: Path, family: str) -> Path:
    """The tokenizer of `file` as a conversion leaves it."""
    tokenizer, ends = read(file)
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": family}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return directory


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_special_tokens_of_other_letters_are_themselves(
    tmp_path: Path, cache: Path, family: str
) -> None:
    """They got ids that the model lacks. And AutoTokenizer drops the BOS of whatever calls itself a Qwen 2."""
    template = "{{ bos_token }}{% for m in messages %}<｜User｜>{{ m.content }}{% endfor %}"
    write_deepseek(
        tmp_path / "tiny.gguf", add_bos_token=True, **{"tokenizer.chat_template": template}
    )
    directory = save(tmp_path / "tiny.gguf", tmp_path / "model", family)
    tokenizer, defaults = load_tokenizer(str(directory))
    assert tokenizer.encode(f"{BOS}ab{USER}{EOS}") == [257, 257, 256, 259, 258]
    assert tokenizer.apply_chat([{"role": "user", "content": "ab"}]) == [257, 259, 256]
    assert (tokenizer.vocab_size, defaults.eos) == (261, (258,))
    assert tokenizer.decode([257, 256, 259]) == f"ab{USER}"


def test_a_gguf_file_has_the_vocabulary_of_the_checkpoint_that_it_was_made_of(
    tmp_path: Path, cache: Path
) -> None:
    """Which has no tokens for padding. The pair was refused for its special tokens."""
    write_deepseek(tmp_path / "tiny.gguf")
    plain = tokenizers.Tokenizer(
        tokenizers.models.BPE({token: id for id, token in enumerate([*ALPHABET, "ab"])}, [])
    )
    plain.add_special_tokens(
        [tokenizers.AddedToken(token, normalized=False) for token in (BOS, EOS, USER)]
    )
    plain.decoder = tokenizers.decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=plain, bos_token=BOS).save_pretrained(
        tmp_path / "plain"
    )
    (tmp_path / "plain" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    ours, theirs = (
        load_tokenizer(str(path))[0]
        for path in (save(tmp_path / "tiny.gguf", tmp_path / "m", "llama"), tmp_path / "plain")
    )
    check_same_vocabulary(ours, theirs, "the file", "the checkpoint")
    assert theirs.vocab_size == 260


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ("pre-tokenizer is 'kimi-k2', which is not read", {"pre": "kimi-k2"}),
        ("merges do not fit its tokens", {"merges": ["a c"]}),
        (
            "does not say which: 'tokenizer.ggml.bos_token_id'",
            {"add_bos_token": True, "bos_token_id": 9999},
        ),
        ("does not say 'tokenizer.ggml.merges'", {"merges": None}),
        ("2 of its tokens are there twice", {"tokens": [*"abab"]}),
        ("its token 1 is 'ca', which is read as 'a'", {"tokens": ["a", "ca", "b", "ab"]}),
        *(
            (f"of the kind '{kind}', which is not read", {"model": kind})
            for kind in ("bert", "t5", "gemma4")
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_had_exactly_is_refused(
    tmp_path: Path, cause: str, said: dict[str, Any]
) -> None:
    write_deepseek(tmp_path / "tiny.gguf", **said)
    with pytest.raises(ValueError, match=cause):
        read(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("tokens", "said", "wanted"),
    [
        (
            {"<|end_of_text|>": CONTROL, "<|eot_id|>": CONTROL, "<|eom_id|>": CONTROL},
            {"eos_token_id": 0},
            [0, 1, 2],
        ),
        ({"<eos>": CONTROL, "<end_of_turn>": USER_DEFINED}, {"eos_token_id": 0}, [0, 1]),
        ({"<|im_end|>": CONTROL, "<|endoftext|>": NORMAL}, {"eos_token_id": 1}, [1, 0]),
        (
            {"word": NORMAL, "stop": CONTROL, "more": CONTROL},
            {"eot_token_id": 1, "eom_token_id": 2},
            [1, 2],
        ),
        ({"</s>": NORMAL, "<b>": NORMAL, "end": CONTROL}, {"eos_token_id": 2}, [2]),
        ({"</s>": CONTROL, "end": CONTROL}, {"eos_token_id": 1}, [1, 0]),
        ({"end": CONTROL}, {"eos_token_id": 999}, []),
        (
            {"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL},
            {"eos_token_id": 1},
            [1, 2],
        ),
        (
            {"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL},
            {"eos_token_id": 0},
            [1, 2],
        ),
        ({"<|end|>": CONTROL, "<|return|>": CONTROL, "<|calls|>": CONTROL}, {}, [1, 2]),
        ({"<|end|>": CONTROL, "<|calls|>": CONTROL, "<|flush|>": CONTROL}, {}, [1, 2]),
        ({"<|end|>": NORMAL, "<|call|>": NORMAL, "<|flush|>": NORMAL}, {}, [1, 2]),
        ({"<|end|>": CONTROL, "<|return|>": CONTROL, "<|flush|>": CONTROL}, {}, [0, 1, 2]),
        ({"<|end|>": CONTROL, "<|call|>": CONTROL}, {}, [0, 1]),
        ({"</s>": CONTROL, "<|tool_response>": CONTROL}, {"eos_token_id": 0}, [1]),
        ({"<|ifm|im_end|>": CONTROL, "[PAD]": CONTROL, "<REPO>": CONTROL}, {}, [0, 1, 2]),
    ],
)
def test_what_ends_a_text(
    tmp_path: Path, tokens: dict[str, int], said: dict[str, int], wanted: list[int]
) -> None:
    """Only `eos_token_id` did: others wrote to the limit. "</s>" may be a word of HTML, as in Qwen's vocabulary.

    The rows with "<|end|>" and the last two are what llama.cpp (b11549) prints: gpt-oss's answer comes after "<|end|>".
    """
    write(
        tmp_path / "tiny.gguf",
        "gpt2",
        tokens | dict.fromkeys([*ALPHABET, "xy"], NORMAL),
        merges=["x y"],
        **said,
    )
    tokenizer, ends = read(tmp_path / "tiny.gguf")
    assert ends == wanted
    assert all(tokenizer.decode([id], skip_special_tokens=True) == "" for id in ends)


WORDS = [
    "▁",
    "▁▁",
    "▁▁▁▁",
    "[",
    "▁[",
    "l",
    "e",
    "le",
    "▁le",
]  # from id 259 on, and each ranks before the next
SPECIAL = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL} | {
    f"<0x{byte:02X}>": BYTE for byte in range(256)
}


def sentencepiece(file: Path, words: dict[str, int], **said: Any) -> Any:
    tokens = SPECIAL | dict.fromkeys(WORDS, NORMAL) | words
    write(file, "llama", tokens, scores=[-float(id) for id in range(len(tokens))], **said)
    return read(file)[0]


@pytest.mark.parametrize(
    ("text", "wanted", "unprefixed"),
    [
        ("[", [1, 263], [1, 262]),
        ("</s>[", [1, 2, 263], [1, 2, 262]),
        (" [", [1, 260, 262], [1, 263]),
        ("</s> le", [1, 2, 260, 266], [1, 2, 267]),
        ("le", [1, 267], [1, 266]),
        ("   le\n", [1, 261, 266, 13], [1, 260, 267, 13]),
        ("é", [1, 259, 198, 172], [1, 198, 172]),
        ("<s></s>", [1, 1, 2], [1, 1, 2]),
        ("", [1], [1]),
    ],
)
def test_sentencepieces_spaces(
    tmp_path: Path, text: str, wanted: list[int], unprefixed: list[int]
) -> None:
    """A space stands before each text, before what follows a special token, and before a space of its own."""
    for prefix, ids in ((True, wanted), (False, unprefixed)):
        tokenizer = sentencepiece(tmp_path / f"{prefix}.gguf", {}, add_space_prefix=prefix)
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace("<s>", "").replace(
            "</s>", ""
        )


def test_user_defined_spaces_are_found_first_and_have_the_name_of_other_files(
    tmp_path: Path,
) -> None:
    """Gemma's, which its checkpoint writes with U+2581. Phi-3's special tokens take the spaces behind them."""
    tokenizer = sentencepiece(
        tmp_path / "gemma.gguf", {"   ": USER_DEFINED}, add_space_prefix=False
    )
    assert tokenizer("le    le")["input_ids"] == [1, 266, 268, 267]
    assert tokenizer.convert_ids_to_tokens(268) == "▁▁▁"
    tokenizer = sentencepiece(
        tmp_path / "phi.gguf", {"<|end|>": CONTROL}, **{"general.name": "Phi3"}
    )
    assert tokenizer("<|end|>\n le<s> le")["input_ids"] == [1, 268, 267, 1, 260, 266]


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({"pre": "llama-bpe"}, [0, 2]),
        ({"pre": "tekken"}, [0, 2]),
        ({"pre": "qwen2"}, [2]),
        ({}, [2]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [2]),
        ({"pre": "qwen2", "add_bos_token": True, "add_eos_token": True}, [0, 2, 1]),
    ],
)
def test_bos_where_the_file_does_not_say(
    tmp_path: Path, said: dict[str, Any], wanted: list[int]
) -> None:
    tokens = {"<b>": CONTROL, "<e>": CONTROL, "x": NORMAL, "y": NORMAL, "xy": NORMAL}
    write(
        tmp_path / "tiny.gguf",
        "gpt2",
        tokens,
        merges=["x y"],
        bos_token_id=0,
        eos_token_id=1,
        **said,
    )
    assert read(tmp_path / "tiny.gguf")[0]("x")["input_ids"] == wanted


HERMES = "{{ tools | tojson }} in <tool_call>"


@pytest.mark.parametrize(
    ("said", "plain", "with_tools"),
    [
        (
            {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": HERMES},
            "plain",
            "[{}] in <tool_call>",
        ),
        (
            {"tokenizer.chat_template": "plain", "tokenizer.chat_template.rag": "rag"},
            "plain",
            "plain",
        ),
        ({"tokenizer.chat_template.tool_use": HERMES}, None, "[{}] in <tool_call>"),
        (
            {"tokenizer.chat_template.../../x": "no file", "tokenizer.chat_template": "plain"},
            "plain",
            "plain",
        ),
    ],
)
def test_the_template_for_tools_is_taken_with_tools(
    tmp_path: Path, said: dict[str, Any], plain: str | None, with_tools: str
) -> None:
    """Templates with names were dropped: a model was told of its tools as its other template does."""
    tokens = dict.fromkeys([*ALPHABET, "xy"], NORMAL)
    write(tmp_path / "tiny.gguf", "gpt2", tokens, merges=["x y"], **said)
    read(tmp_path / "tiny.gguf")[0].save_pretrained(tmp_path / "model")
    described = tmp_path / "described"  # as a GGUF file itself is loaded
    described.mkdir()
    made, settings, _ = tokenizer_of(read_header(tmp_path / "tiny.gguf")[0])
    made.save(str(described / "tokenizer.json"))
    (described / "tokenizer_config.json").write_text(json.dumps(settings))
    chat = [{"role": "user", "content": "a"}]
    for directory in (tmp_path / "model", described):
        tokenizer = FileTokenizer(directory)
        assert tokenizer.chat_text(chat) == plain
        assert tokenizer.chat_text(chat, [{}]) == with_tools


def test_a_file_in_parts_is_refused_at_once(tmp_path: Path, cache: Path) -> None:
    writer = gguf.GGUFWriter(file := tmp_path / "tiny-00002-of-00003.gguf", "llama")
    writer.add_uint16("split.no", 1)
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        ModelError, match=r"one of 3 parts\. Merge them with llama\.cpp's `llama-gguf-split --merge"
    ):
        directory_of(file, silent)
