"""Templates render as in transformers, say what the assistant writes, and end."""

import json
from pathlib import Path

import pytest

from mpctl.core.errors import InputError
from mpctl.train.data.chat_prepare import ChatSettings, make_encoder
from mpctl.train.data.chat_template import ChatTemplate, read_tokenizer_files
from mpctl.train.data.conversations import conversation_of
from tests.train.runtime.chat import make_tokenizer

TAGGED = """{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<|im_end|>{% endgeneration %}
    {%- else %}{{ m.content }}<|im_end|>{% endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
PLAIN = TAGGED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
LLAMA = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]
{%- elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% else %}
{{- raise_exception('only user and assistant, not ' + m.role) }}{% endif %}{% endfor %}"""
TOOLS = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if loop.index0 == 2 %}{% continue %}
{%- endif %}{{ m.content }}{% if loop.last %}{% break %}{% endif %}|{% endfor %}"""
TALK = [
    {"role": "user", "content": "hi <b> & é"},
    {"role": "assistant", "content": "yo "},
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "zz"},
]
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}


def turns(template: ChatTemplate, messages=TALK, first: int = 0) -> list[str]:
    text, spans = template.conversation(messages, first=first)
    return [text[start:stop] for start, stop in spans]


@pytest.mark.parametrize("text", [TAGGED, PLAIN, LLAMA, TOOLS])
def test_texts_are_those_of_transformers(text: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    tools = [{"type": "function", "function": {"name": "é<>"}}]
    texts, spans = utils.render_jinja_template(
        [TALK], tools=tools, chat_template=text, return_assistant_tokens_mask=True, **NAMED
    )
    mine = ChatTemplate(text, variables=NAMED).conversation(TALK, tools=tools) if "generation %" in text else None
    assert ChatTemplate(text, variables=NAMED).render(TALK, tools=tools).text == texts[0]
    assert mine is None or mine.spans == spans[0]


def test_tokens_and_masks_are_those_of_transformers(tmp_path: Path) -> None:
    """Characters of several bytes, spaces and line ends at the borders of turns."""
    transformers = pytest.importorskip("transformers")
    folder = make_tokenizer(tmp_path / "tokenizer")
    encoder = make_encoder(folder / "tokenizer.json", ChatSettings(str(folder), 64))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    theirs.chat_template = (folder / "chat_template.jinja").read_text()
    for line in (Path(__file__).parents[3] / "examples" / "chat" / "messages.jsonl").read_text().splitlines()[:12]:
        messages = [{**one, "content": f" {one['content']} é☃ \n"} for one in json.loads(line)["messages"]]
        conversation = conversation_of({"messages": messages}, "")
        (found,) = encoder.encode([conversation], [encoder.rendered(conversation)])
        wanted = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
        assert found.ids.tolist() == wanted["input_ids"]
        assert found.mask.tolist() == list(map(bool, wanted["assistant_masks"]))


def test_turns_with_and_without_the_tag_are_the_same() -> None:
    assert turns(ChatTemplate(TAGGED)) == ["yo<|im_end|>", "zz<|im_end|>"]
    assert turns(ChatTemplate(PLAIN, specials=["<|im_end|>"])) == ["yo<|im_end|>", "zz<|im_end|>"]
    assert turns(ChatTemplate(PLAIN)) == ["yo<|im_end|>\n", "zz<|im_end|>\n"]  # the line end is the turn's
    assert turns(ChatTemplate(LLAMA, variables=NAMED)) == [" yo </s>", " zz</s>"]


@pytest.mark.parametrize("text", [TAGGED, PLAIN])
def test_given_messages_are_not_trained(text: str) -> None:
    assert turns(ChatTemplate(text, specials=["<|im_end|>"]), first=3) == ["zz<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    forgets = "{% for m in messages %}<{{ m.role }}>{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="writes message 2 otherwise when others follow"):
        ChatTemplate(forgets).conversation(TALK)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "300,000 loop rounds"),
        ("{% for i in range(10000000) %}{% endfor %}", "Range too big"),
        ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "16,777,216"),
        ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}", "16,777,216"),
        ("{{ 'x' * 1000000000 }}", "16,777,216"),
        ("{{ '%999999999d' % 1 }}", "16,777,216"),
        ("{{ '{:>999999999}'.format(1) }}", "16,777,216"),
        ("{{ 'x'.ljust(10000000000) }}", "16,777,216"),
        ("{{ 'x'|center(10000000000) }}", "16,777,216"),
        ("{% set x = 'a' * 10000000 %}{{ x|replace('a', x) }}", "16,777,216"),
        ("{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{{ 10 ** 10 ** 10 }}", "powers"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set n = namespace(_x=1) %}", "private name"),
        ("{{ messages[9].role }}", "no element 9"),
        ("{{ raise_exception('roles must alternate') }}", "failed: roles must alternate"),
    ],
)
def test_what_a_template_must_not_do(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ChatTemplate(text).render(TALK)


def test_a_rendering_may_not_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpctl.train.data.chat_template.MOST_SECONDS", 0.05)
    with pytest.raises(ValueError, match="of processor time"):
        ChatTemplate("{% for i in range(90000) %}{{ range(3000)|list|length and '' }}{% endfor %}").render(TALK)


def test_wrong_syntax_names_the_line() -> None:
    with pytest.raises(InputError, match=r"a\.jinja: line 2: "):
        ChatTemplate("x\n{% if %}", source="a.jinja")


def test_files_next_to_a_tokenizer(tmp_path) -> None:
    tokenizer, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    assert read_tokenizer_files(tokenizer) == (None, {})
    config.write_text('{"chat_template": "A", "eos_token": {"content": "<e>"}, "bos_token": "<b>", "pad_token": null}')
    assert read_tokenizer_files(tokenizer) == (("A", str(config)), {"eos_token": "<e>", "bos_token": "<b>"})
    config.write_text('{"chat_template": [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]}')
    assert read_tokenizer_files(tokenizer).template == ("D", str(config))
    (tmp_path / "chat_template.jinja").write_text("B")
    assert read_tokenizer_files(tokenizer).template == ("B", str(tmp_path / "chat_template.jinja"))
    config.write_text("[")
    with pytest.raises(InputError, match="damaged"):
        read_tokenizer_files(tokenizer)
