"""Reading tokenizers, comparing vocabularies, and the defaults as transformers reads them."""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, PreTrainedTokenizerBase

from pearl.config import SamplingParams
from pearl.engine.request import Chat, encode, submission
from pearl.errors import ModelError, RequestError
from pearl.models.checkpoints.tokenizers import ToyTokenizer, load_tokenizer
from pearl.text.chat_template import chat_prompt
from pearl.text.stream import Tokenizer, Tools
from pearl.text.tokenizer import (
    FileTokenizer,
    GenerationDefaults,
    check_same_vocabulary,
    copy_tokenizer,
    vocabulary_digest,
)
from pearl.text.tools import FORMATS, format_of
from tests.replace import replace
from tests.tiny import CHAT_TEMPLATE
from tests.tokenizers import byte_fallback_files, byte_level, byte_level_files

TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompt here') }}{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>bot:{% endif %}"
)


def said(tokenizer: Tokenizer, chat: list[dict[str, str]]) -> str | None:
    """The prompt; None: the template refuses."""
    try:
        return tokenizer.chat_text(chat)
    except RequestError:
        return None


class Theirs(Tokenizer):
    """As transformers reads a checkpoint."""

    def __init__(self, tokenizer: Any) -> None:
        self.inner = tokenizer
        self.vocab_size = max(len(tokenizer), 1 + max(tokenizer.get_added_vocab().values()))
        self.chat_template = tokenizer.chat_template or ""

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(self.inner(text, add_special_tokens=special)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        known = [id for id in ids if self.token(id) is not None]
        return str(
            self.inner.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def chat_text(
        self, messages: list[dict[str, Any]], tools: Tools = None, **variables: Any
    ) -> str | None:
        if self.inner.chat_template is None:
            return None
        ours: dict[str, Any] = {
            "tools": tools,
            "add_generation_prompt": True,
            "tokenize": False,
            **variables,
        }
        return chat_prompt(
            lambda given: str(self.inner.apply_chat_template(given, **ours)), messages
        )

    def token(self, id: int) -> str | None:
        return self.inner.convert_ids_to_tokens(id) if 0 <= id < self.vocab_size else None


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint's directory without weights and without generation_config.json."""
    byte_level_files().save_pretrained(tmp_path)
    LlamaConfig(eos_token_id=7).save_pretrained(tmp_path)
    return tmp_path


def defaults(directory: Path, **options: Any) -> GenerationDefaults:
    (directory / "generation_config.json").write_text(json.dumps(options))
    return load_tokenizer(str(directory))[1]


class TestIds:
    def test_special_and_unknown_tokens_have_no_text(self) -> None:
        """A model's logits cover padding ids that no tokenizer knows; sampling one must not end the run."""
        tokenizer = byte_level()
        ids = tokenizer.encode("the cat")
        assert tokenizer.decode([0, *ids, tokenizer.vocab_size, 10**6, 1]) == "the cat"
        assert tokenizer.token(tokenizer.vocab_size) is None
        assert tokenizer.token(-1) is None

    def test_added_tokens_beyond_a_gap_are_counted(self, checkpoint: Path) -> None:
        """len(tokenizer) counts tokens; an added one's id may be higher than that."""
        file = checkpoint / "tokenizer.json"
        data = json.loads(file.read_text())
        data["added_tokens"].append({**data["added_tokens"][0], "id": 500, "content": "<far>"})
        file.write_text(json.dumps(data))
        tokenizer, _ = load_tokenizer(str(checkpoint))
        *_, last = tokenizer.encode("a<far>")
        assert tokenizer.token(last) == "<far>"
        assert tokenizer.vocab_size == last + 1


TEXTS = ["the cat", "the  <s>cat</s>\n", "Grüße, 中文 👩‍🚀", "", " a "]


FAR = {
    "content": "<far>",
    "single_word": False,
    "lstrip": True,
    "rstrip": False,
    "normalized": False,
}
SPECIAL: list[
    dict[str, Any]
] = [  # how tokenizer_config.json lists special tokens beside the usual ones
    {"extra_special_tokens": {"image_token": "cat", "sound": "<far>"}},
    {"extra_special_tokens": {"image_token": FAR | {"__type": "AddedToken", "special": True}}},
    {"extra_special_tokens": ["cat", "<far>"]},
    {"extra_special_tokens": [FAR | {"__type": "AddedToken", "special": True}]},
    {"additional_special_tokens": ["<image>"]},
    {"additional_special_tokens": ["cat"], "extra_special_tokens": ["the"]},
    {"additional_special_tokens": ["cat"], "extra_special_tokens": {"sound": "the"}},
    {"model_specific_special_tokens": {"image_token": "<image>"}},
    {"image_token": FAR | {"__type": "AddedToken", "special": True}},
]


def nested(one: dict[str, Any]) -> list[dict[str, Any]]:
    """A tool or message whose JSON can be parsed, and is too deep for who writes it amid other calls."""
    deep: dict[str, Any] = {}
    for _ in range(970):
        deep = {"a": deep}
    function = {"name": "f", "parameters": deep, "arguments": deep}
    return [
        {**one, "function": function}
        if "function" in one
        else {**one, "tool_calls": [{"function": function}]}
    ]


def both(checkpoint: Path) -> tuple[Theirs, FileTokenizer]:
    """As transformers reads it, and as we do."""
    found, _ = load_tokenizer(str(checkpoint))
    assert isinstance(found, FileTokenizer)
    return Theirs(AutoTokenizer.from_pretrained(checkpoint)), found


class TestFileTokenizer:
    """A checkpoint's tokenizer.json is read without transformers, and gives the same."""

    @pytest.mark.parametrize("kind", [byte_level_files, byte_fallback_files])
    def test_it_gives_the_same(
        self, tmp_path: Path, kind: Callable[[], PreTrainedTokenizerBase]
    ) -> None:
        kind().save_pretrained(tmp_path)
        LlamaConfig(eos_token_id=7).save_pretrained(tmp_path)
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
        made, ours = both(tmp_path)
        check_same_vocabulary(made, ours, "made", "ours")
        assert (made.vocab_size, made.inner.eos_token_id) == (ours.vocab_size, ours.eos)
        for text in TEXTS:
            for special in (True, False):
                assert made.encode(text, special) == ours.encode(text, special)
            assert made.decode([*made.encode(text), 10**6]) == ours.decode(
                [*made.encode(text), 10**6]
            )
            # A user's control tokens are text to us, not to transformers.
            plain = text.replace("<s>", "(s)").replace("</s>", "(/s)")
            chat = [{"role": "user", "content": plain}, {"role": "assistant", "content": text}]
            assert made.apply_chat(chat) == ours.apply_chat(chat)
            assert made.chat_text(chat) == ours.chat_text(chat)
        with pytest.raises(RequestError, match="no system prompt here"):
            ours.apply_chat([{"role": "system", "content": "be brief"}])
        with pytest.raises(RequestError, match="half a surrogate pair"):
            ours.encode(
                "caf\udce9"
            )  # bytes of Latin-1 on a command line: they once ended it with a traceback
        with pytest.raises(RequestError, match="half a surrogate pair"):
            ours.apply_chat([{"role": "user", "content": "caf\udce9"}])

    def test_special_tokens_that_only_the_settings_name(self, checkpoint: Path) -> None:
        file = checkpoint / "tokenizer_config.json"
        settings = json.loads(file.read_text())
        far = {
            "content": "<far>",
            "single_word": False,
            "lstrip": True,
            "rstrip": False,
            "normalized": False,
        }
        settings["added_tokens_decoder"] = {"300": {**far, "special": False}}
        file.write_text(
            json.dumps(
                settings
                | {
                    "pad_token": {**far, "content": "<pad>", "__type": "AddedToken"},
                    "sep_token": "cat",
                }
            )
        )
        made, ours = both(checkpoint)
        text = "the <far>cat<pad> a"
        assert made.encode(text) == ours.encode(text)
        assert made.decode(made.encode(text)) == ours.decode(made.encode(text))
        check_same_vocabulary(made, ours, "made", "ours")

    @pytest.mark.parametrize("settings", SPECIAL)
    def test_special_tokens_have_no_text_however_settings_list_them(
        self, checkpoint: Path, settings: dict[str, Any]
    ) -> None:
        """Mappings and lists of further tokens were not read: such tokens were split and shown."""
        file = checkpoint / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))
        (checkpoint / "chat_template.jinja").write_text(
            "{{ image_token }}|{{ sound }}|{{ messages[0].content }}"
        )
        made, ours = both(checkpoint)
        text = "the cat <image> <far>a"
        assert ours.encode(text) == made.encode(text)
        assert ours.decode(ours.encode(text)) == made.decode(made.encode(text)) != text
        chat = [{"role": "user", "content": "a"}]
        assert ours.chat_text(chat) == made.chat_text(chat)

    def test_a_copy_is_the_same(self, checkpoint: Path, tmp_path: Path) -> None:
        (checkpoint / "additional_chat_templates").mkdir()
        (checkpoint / "additional_chat_templates" / "tool_use.jinja").write_text(
            "{{ tools | length }} tools"
        )
        defaults(checkpoint, eos_token_id=5)
        (copy := tmp_path / "copy").mkdir()
        copy_tokenizer(checkpoint, copy)
        (found, settings), (original, _) = (
            load_tokenizer(str(copy)),
            load_tokenizer(str(checkpoint)),
        )
        assert settings.eos == (5,)
        assert found.encode("the cat") == original.encode("the cat")
        assert found.chat_text([], [{}]) == original.chat_text([], [{}]) == "1 tools"

    @pytest.mark.parametrize(
        "template",
        [
            CHAT_TEMPLATE,
            "{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
            "{{ m.content | trim }}{% if loop.last %}{% break %}{% endif %}\n  {% endfor %}{{ eos_token }}",
            "{% if messages[0].role == 'system' %}{{ raise_exception('') }}{% endif %}{{ messages | tojson }}",
            "{{ dict(a=1).a }}{{ tools is none }}{{ documents }}{{ strftime_now('%Y') }}",
            "{% for m in messages %}\n  {% generation %}\n {% set a = 1 %}{{ m.content }}{% endgeneration %} {{ a }}"
            "{% endfor %}",
            "{{ ''.__class__.__mro__ }}",
            "{{ dict.__class__ }}{{ dict.mro() }}",
        ],
    )
    def test_templates_are_rendered_as_transformers_does(
        self, checkpoint: Path, template: str
    ) -> None:
        """A way out of the sandbox is none in either."""
        (checkpoint / "chat_template.jinja").write_text(template)
        made, ours = both(checkpoint)
        for roles in (["user"], ["system", "user"], ["user", "assistant", "user"]):
            chat = [{"role": role, "content": f" <b> {role} & é\n"} for role in roles]
            assert said(ours, chat) == said(made, chat)

    def test_tools_are_told_as_transformers_does(self, checkpoint: Path) -> None:
        """Only by a template that asks for them; of another one they are refused."""
        template = (
            "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
            "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
        )
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        call = {"type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": [call]},
        ]
        (checkpoint / "chat_template.jinja").write_text(template)
        made, kept = both(checkpoint)
        told = kept.chat_text(chat, tools)
        assert told == made.chat_text(chat, tools)
        assert '"name": "f"' in told
        assert '{"x": "é"}' in told
        assert (
            encode(kept, Chat(chat, tools)) == kept.apply_chat(chat, tools) != kept.apply_chat(chat)
        )
        assert encode(kept, Chat(chat, ())) == kept.apply_chat(chat)
        for deep in (Chat(chat, nested(tools[0])), Chat([chat[0], *nested(chat[1])], ())):
            for tokenizer in (made, kept):
                with pytest.raises(
                    RequestError, match="nested too deep for the model's chat template"
                ):
                    encode(tokenizer, deep)
        (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
        silent = load_tokenizer(str(checkpoint))[0]
        told = silent.decode(encode(silent, Chat(chat[:1], tools)))
        assert '"name": "f"' in told
        assert "<tool_call>" in told
        with pytest.raises(RequestError, match="no chat template"):
            encode(byte_level(), Chat(chat[:1], tools))

    @pytest.mark.parametrize(
        ("template", "told"),
        [
            (
                "{% for m in messages %}{% for c in m.tool_calls %}{{ '>' + c.function.arguments }}",
                '>{"x": 2}',
            ),
            (
                "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.x + 1 }}",
                "3",
            ),
            (
                "{% for m in messages %}{{ m.content + '.' }}{% for c in m.tool_calls or [] %}",
                "a\nb.",
            ),
        ],
    )
    @pytest.mark.parametrize("arguments", [{"x": 2}, '{"x": 2}'])
    def test_each_template_gets_arguments_and_contents_as_it_takes_them(
        self, checkpoint: Path, template: str, told: str, arguments: object
    ) -> None:
        """DeepSeek's join arguments as text: TypeError, which was an HTTP 500, as was the content in parts."""
        (checkpoint / "chat_template.jinja").write_text(template + "{% endfor %}{% endfor %}")
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        chat = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        if "content" in template:
            chat = [{"role": "user", "content": parts}]
        assert load_tokenizer(str(checkpoint))[0].chat_text(chat) == told

    @pytest.mark.parametrize(
        ("raises", "quoted"),
        [
            ("{{ 1 + 'a' }}", "TypeError: unsupported operand"),
            ("{{ {}.popitem() }}", "SecurityError|KeyError|access to"),
            ("{{ 1 // 0 }}", "ZeroDivisionError"),
            ("{{ 'x'.index('y') }}", "ValueError: substring not found"),
            ("{{ messages[9].content }}", "has no element 9"),
        ],
    )
    def test_whatever_a_template_raises_is_told(
        self, checkpoint: Path, raises: str, quoted: str
    ) -> None:
        (checkpoint / "chat_template.jinja").write_text(raises)
        with pytest.raises(RequestError, match=f"does not take these messages: .*({quoted})"):
            load_tokenizer(str(checkpoint))[0].apply_chat([{"role": "user", "content": "a"}])

    @pytest.mark.parametrize("name", ["chat_template.json", "chat_template.jinja"])
    def test_a_template_may_be_a_file(self, checkpoint: Path, name: str) -> None:
        """The first is of models that read pictures, and gives way to a tokenizer's own."""
        text = json.dumps({"chat_template": TEMPLATE}) if name.endswith("json") else TEMPLATE
        (checkpoint / name).write_text(text)
        tokenizer = FileTokenizer(checkpoint)
        assert said(tokenizer, [{"role": "user", "content": "a"}]) == "<s>user: a</s><s>bot:"
        assert tokenizer.chat_template == TEMPLATE
        settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
        (checkpoint / "tokenizer_config.json").write_text(
            json.dumps(settings | {"chat_template": "own"})
        )
        own = FileTokenizer(checkpoint).chat_template
        assert own == ("own" if name.endswith("json") else TEMPLATE)

    def test_the_template_for_tools_is_taken_with_tools(self, checkpoint: Path) -> None:
        """Of a checkpoint whose templates have names."""
        tokenizer = deepcopy(byte_level_files())
        tokenizer.chat_template = {"default": "plain", "tool_use": "{{ tools | length }} tools"}
        tokenizer.save_pretrained(checkpoint)
        made, kept = both(checkpoint)
        for each in (made, kept):
            assert each.chat_text([{"role": "user", "content": "a"}]) == "plain"
            assert each.chat_text([{"role": "user", "content": "a"}], [{}, {}]) == "2 tools"

    def test_calls_are_written_as_the_template_for_tools_shows(self, checkpoint: Path) -> None:
        """Their format was looked for in the other template."""
        tokenizer = deepcopy(byte_level_files())
        tokenizer.chat_template = {
            "default": "plain",
            "tool_use": "{{ tools | length }} tools: [TOOL_CALLS]",
        }
        tokenizer.save_pretrained(checkpoint)
        assert format_of(FileTokenizer(checkpoint)) is FORMATS["mistral"]


class TestToyTokenizer:
    @pytest.mark.parametrize("size", [0, -1, 10**9])
    def test_sizes_that_cannot_be(self, size: int) -> None:
        with pytest.raises(ModelError, match="toy vocabulary"):
            ToyTokenizer(size)

    def test_no_token_reads_as_an_unfinished_character(self) -> None:
        """The detokenizer would hold it back; a surrogate could not even be printed."""
        tokenizer = ToyTokenizer(100_000)
        text = tokenizer.decode(range(100_000))
        assert "\ufffd" not in text
        assert len(set(text.encode().decode())) == 100_000


class TestVocabularies:
    def test_padding_on_either_side_is_fine(self) -> None:
        """CodeLlama 7B has 32016 tokens, 34B 32000."""
        check_same_vocabulary(ToyTokenizer(40), ToyTokenizer(32), "a", "b")
        check_same_vocabulary(ToyTokenizer(32), ToyTokenizer(40), "a", "b")
        assert vocabulary_digest(ToyTokenizer(40), 32) == vocabulary_digest(ToyTokenizer(32), 32)
        assert vocabulary_digest(ToyTokenizer(40), 40) != vocabulary_digest(ToyTokenizer(32), 32)

    def test_the_first_token_that_differs_is_named(self) -> None:
        """Only the order differs: the same set of tokens is not the same vocabulary."""
        target, draft = ToyTokenizer(32), Renumbered(ToyTokenizer(32))
        with pytest.raises(
            ModelError, match=r"'big'.*'small'.*token 5 is '5' in the target and '6' in the"
        ):
            check_same_vocabulary(target, draft, "big", "small")
        assert vocabulary_digest(target, 5) == vocabulary_digest(draft, 5)
        assert vocabulary_digest(target, 6) != vocabulary_digest(draft, 6)


class Renumbered(ToyTokenizer):
    """Tokens 5 and 6 have changed places."""

    def __init__(self, inner: Tokenizer) -> None:
        super().__init__(inner.vocab_size)

    def token(self, id: int) -> str | None:
        return super().token({5: 6, 6: 5}.get(id, id))


class TestDefaults:
    def test_what_a_checkpoint_sets(self, checkpoint: Path) -> None:
        """do_sample false makes it greedy whatever the temperature; the filters stay for who sets one."""
        sampling = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1}
        cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (
                {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 1},
                {"top_p": 0.9, "eos": (1,)},
            ),
            ({"eos_token_id": 1}, {"eos": (1,)}),
            ({"do_sample": True, **sampling, "eos_token_id": [2, 1]}, {**sampling, "eos": (2, 1)}),
            # As with `generate`, an id that no token has ends no text; and it is no reason to refuse every request.
            ({"eos_token_id": -1}, {}),
            ({"eos_token_id": [2, -1, None, 2**40]}, {"eos": (2,)}),
            # `generate` ends at 2.0 as at 2, and refuses the others.
            (
                {"eos_token_id": [2.0, 2.5, "3"]},
                {"eos": (2,), "ignored": ("eos_token_id 2.5", "eos_token_id '3'")},
            ),
        ]
        for options, wanted in cases:
            assert defaults(checkpoint, **options) == GenerationDefaults(**wanted), options

    def test_what_a_sampling_checkpoint_leaves_open(self, checkpoint: Path) -> None:
        """generate() filters by its own top_k of 50; a checkpoint that wants none says 0."""
        usual = GenerationConfig._get_default_generation_params()
        found = defaults(checkpoint, do_sample=True, eos_token_id=1)
        wanted = (usual["temperature"], usual["top_k"], usual["top_p"])
        assert (found.temperature, found.top_k, found.top_p) == wanted
        assert defaults(checkpoint, do_sample=True, top_k=0, eos_token_id=1).top_k == 0

    def test_eos_from_the_model_and_from_the_tokenizer(self, checkpoint: Path) -> None:
        assert load_tokenizer(str(checkpoint))[1].eos == (7,)
        assert defaults(checkpoint, do_sample=False).eos == (7,)
        LlamaConfig(eos_token_id=None).save_pretrained(checkpoint)
        assert defaults(checkpoint, do_sample=False).eos == (1,)
        (checkpoint / "generation_config.json").unlink()
        assert load_tokenizer(str(checkpoint))[1].eos == (1,)

    @pytest.mark.parametrize(
        ("tokens", "asked", "limit"), [(10, None, 15), (10, 20, 30), (60, None, 64), (10, 2, 12)]
    )
    def test_a_checkpoints_limit_is_the_default(
        self, checkpoint: Path, tokens: int, asked: int | None, limit: int
    ) -> None:
        """It gives way to what the caller asks for and to the context, of 64 here; it was not read."""
        found = defaults(checkpoint, max_new_tokens=5, eos_token_id=1)
        assert (
            found
            == load_tokenizer(str(checkpoint))[1]
            == GenerationDefaults(eos=(1,), max_tokens=5)
        )
        params = SamplingParams(seed=1, max_tokens=asked)
        assert submission(1, [1] * tokens, 64, params, found).limit == limit

    def test_what_is_not_supported_is_named(self, checkpoint: Path) -> None:
        """Qwen2.5's repetition_penalty of 1.05 is honoured; 1.0 or what only sampling reads changes nothing."""
        penalties = {"repetition_penalty": 1.05, "suppress_tokens": [3], "min_length": 0}
        found = defaults(checkpoint, typical_p=0.9, **penalties)
        assert (found.repetition_penalty, found.ignored) == (1.05, ("suppress_tokens",))
        found = defaults(checkpoint, do_sample=True, repetition_penalty=1.0, typical_p=0.9)
        assert found.ignored == ("typical_p",)

    def test_what_cannot_be_is_as_if_it_were_not_set(self, checkpoint: Path) -> None:
        """It is named. Every request was refused as a bug of ours, greedy ones too."""
        for name, value in [
            *(("top_k", -1), ("top_k", 2**40), ("top_p", 0.0), ("min_p", 1.5)),
            *(("repetition_penalty", -1.0), ("repetition_penalty", 500.0), ("temperature", -2.0)),
        ]:
            for samples in (False, True):
                found = defaults(checkpoint, do_sample=samples, **{"top_k": 0, name: value})
                wanted = defaults(checkpoint, do_sample=samples, top_k=0)
                assert found == replace(wanted, ignored=(f"{name} {value}",))

    def test_ids_that_end_a_text_are_counted_once_and_bounded(self, checkpoint: Path) -> None:
        """With more of them no request could be sent."""
        assert defaults(checkpoint, eos_token_id=[*range(2048)] * 2).eos == tuple(range(2048))
        with pytest.raises(
            ModelError, match=r"cannot be used: 2,049 tokens are said to end its texts"
        ):
            defaults(checkpoint, eos_token_id=[*range(2049)])


class TestLoading:
    def test_toy(self) -> None:
        tokenizer, found = load_tokenizer("toy:vocab=48,seed=3,eos=5")
        assert (tokenizer.vocab_size, found) == (48, GenerationDefaults(eos=(5,)))
        tokenizer, found = load_tokenizer("toy")
        assert (tokenizer.vocab_size, found.eos) == (32, ())
        with pytest.raises(ModelError, match="is not int"):
            load_tokenizer("toy:vocab=many")

    @pytest.mark.parametrize(
        ("files", "told"),
        [
            ({}, r"could not be loaded.*tokenizer\.json"),
            (
                {
                    "config.json": {"model_type": "mistral"},
                    "tekken.json": {"config": {"version": "v3"}, "vocab": []},
                },
                r"could not be loaded.*needs config\.json and tokenizer\.json",
            ),
            (None, "no such"),
        ],
        ids=["no tokenizer", "Mistral's own format", "no such model"],
    )
    def test_what_holds_no_tokenizer_is_refused(
        self, tmp_path: Path, files: dict[str, Any] | None, told: str
    ) -> None:
        for name, content in (files or {}).items():
            (tmp_path / name).write_text(json.dumps(content))
        with pytest.raises(ModelError, match=told):
            load_tokenizer(
                str(tmp_path if files is not None else tmp_path / "nowhere" / "at" / "all")
            )

    def test_a_broken_generation_config(self, checkpoint: Path) -> None:
        """transformers reads one that it cannot parse as none at all: the checkpoint's EOS would be lost."""
        (checkpoint / "generation_config.json").write_text("{")
        with pytest.raises(ModelError, match="could not be loaded"):
            load_tokenizer(str(checkpoint))
