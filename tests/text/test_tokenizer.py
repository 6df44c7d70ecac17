"""Loading a tokenizer, what it refuses, and chat templates."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import pytest
import test_detokenizer as detokenizer
import tokenizers
from fake_client import EOS, byte_tokenizer
from support.service import ROOT
from support.structured import tokenizer_of
from support.turns import lets_others_run
from tokenizers import decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.errors import InvalidRequestError, ModelLoadError
from engine.text.plain import PlainTokenizer
from engine.text.processor import Tokenizer, load_tokenizer
from engine.text.tokenizer_loading import ELSEWISE, GENERIC, is_generic
from server.config.settings import DEMOS

TEMPLATES = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat_templates" / "models" / "templates"
TEXT = "Once upon a time, there was a little girl."
byte_level = cache(partial(detokenizer.byte_level, (TEXT,)))


def test_encoding_ignores_truncation_and_padding_that_the_file_brings(tmp_path: Path) -> None:
    hf = byte_level()._hf
    hf.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    spec = json.loads(path.read_text())
    spec["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(spec))
    assert tokenizer_of(tmp_path).encode(TEXT) == hf.encode(TEXT)


def test_encoding_lets_other_threads_run() -> None:
    """A service that reads a long text goes on answering."""
    tokenizer = byte_level()
    assert lets_others_run(lambda: tokenizer.encode("word " * 200_000))


def test_unpaired_surrogates_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="unpaired surrogate"):
        byte_level().encode("a\ud800b")


def test_a_folder_without_a_tokenizer_gives_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None
    assert load_tokenizer(str(tmp_path)) is None


@pytest.mark.parametrize("content", ["{", '{"version": "1.0"}', "\x00\x01"])
def test_a_broken_tokenizer_is_a_clear_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match="cannot be loaded") as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "--skip-tokenizer-init" in str(caught.value)


def test_no_code_from_the_model_runs(tmp_path: Path) -> None:
    hf = byte_level()._hf
    hf.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    config["tokenizer_class"] = "Evil"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with contextlib.suppress(ModelLoadError):  # refusing is as good as ignoring
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_chat_template(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    plain = byte_level()
    assert plain.chat_template is None
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        plain.apply_chat_template(messages)
    assert caught.value.param == "messages"
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
        "{% if mood is defined %}{{ mood }}{% endif %}"
    )
    plain._hf.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = tokenizer_of(tmp_path)
    assert tokenizer.chat_template == template
    assert tokenizer.apply_chat_template(messages) == "<s>[user]hi[assistant]"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False, mood="!") == "<s>[user]hi!"
    assert plain.apply_chat_template(messages, chat_template=template) == "<s>[user]hi[assistant]"
    with pytest.raises(InvalidRequestError, match="no system role"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}])
    with pytest.raises(InvalidRequestError):
        plain.apply_chat_template(messages, chat_template="{{ messages.__class__.__mro__[1].__subclasses__() }}")


@pytest.mark.slow
def test_real_chat_templates_render_or_refuse() -> None:
    if not TEMPLATES.is_dir():
        pytest.skip("no chat templates among the shared data")
    tokenizer = byte_level()
    rendered = 0
    for path in sorted(TEMPLATES.glob("*.jinja")):
        try:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": "What is an octavo?"}], chat_template=path.read_text()
            )
        except InvalidRequestError:
            continue
        assert "What is an octavo?" in text
        rendered += 1
    assert rendered > 30


@pytest.mark.parametrize("name", ["no/such/folder", "../missing"])
def test_a_path_that_is_neither_folder_nor_hub_id(name: str) -> None:
    with pytest.raises(ModelLoadError, match="is not a local folder"):
        load_tokenizer(name)


def test_bytes_of_tokens_that_are_parts_of_characters() -> None:
    over_bytes = byte_tokenizer()
    assert [over_bytes.token_bytes(token) for token in range(256)] == [bytes([token]) for token in range(256)]
    assert over_bytes.token_bytes(EOS) == b"<eos>"
    assert over_bytes.token_bytes(EOS + 1) == b""
    vocab = {"<unk>": 0, "▁a": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    model = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fallback = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>"))
    assert [fallback.token_bytes(byte + 2) for byte in "☃".encode()] == [bytes([byte]) for byte in "☃".encode()]
    assert fallback.token_bytes(1) == b" a"


def test_kinds_that_transformers_reads_by_other_classes_are_listed() -> None:
    """Of these a tokenizer.json is left to AutoTokenizer, whatever class the folder names."""
    from transformers.models.auto import tokenization_auto as auto

    generic = GENERIC | {"PythonBackend"}
    own = {
        kind
        for kind in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        if (auto.TOKENIZER_MAPPING_NAMES.get(kind) or "").removesuffix("Fast") not in generic
    }
    source = Path(auto.__file__).read_text(encoding="utf-8")  # the mapping depends on what is installed here
    mistral = set(re.findall(r'"(\w+)",\s+"MistralCommonBackend"\n', source))
    assert len(mistral) > 5
    assert own | mistral == ELSEWISE


ALL = "{% for message in messages %}{{ message.content }}{% endfor %}"
NEW = {"content": "<new>", "lstrip": True, "rstrip": False, "normalized": True, "single_word": False, "special": False}
SETTINGS = {
    "as it is": {},
    "nothing": {"eos_token": None, "bos_token": None, "additional_special_tokens": None},
    "tokens": {"unk_token": "<what>", "pad_token": "</s>", "extra_special_tokens": ["<|user|>", "<|more|>"]},
    "added": {"mask_token": "<new>", "added_tokens_decoder": {"1536": NEW, "1537": NEW | {"content": "<other>"}}},
    "sides": {"truncation_side": "left", "model_input_names": ["input_ids", "token_type_ids"], "chat_template": ALL},
    "tidy": {"clean_up_tokenization_spaces": True, "sep_token": "a"},
}
# Of these `transformers` has to make sense.
ODD = {
    "objects": {"bos_token": {"__type": "AddedToken"} | NEW, "added_tokens_decoder": {}},
    "templates": {"chat_template": [{"name": "default", "template": ALL}]},
    "further": {"image_token": "<s>"},
}


def demo_with(folder: Path, settings: dict[str, object], kind: str | None = "llama") -> None:
    """The bundled model's tokenizer with other settings."""
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / file).write_bytes((DEMOS["chat"] / file).read_bytes())
    if "chat_template" in settings:
        (folder / "chat_template.jinja").unlink()
    given = json.loads((folder / "tokenizer_config.json").read_text())
    given |= {"add_eos_token": True, "add_bos_token": True} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    if kind is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))


def assert_same(ours: Tokenizer, theirs: Tokenizer) -> None:
    """Whatever they are asked, they give the same."""
    texts = [TEXT, "", "Hi .  <new> there<s>, don 't <|user|> <|more|>\n", *theirs.template_variables.values()]
    assert ours._fast.to_str() == theirs._fast.to_str()
    assert ours.special_token_ids == theirs.special_token_ids
    for name in ("bos", "eos", "unk", "pad", "cls", "mask"):
        assert getattr(ours, f"{name}_token_id") == getattr(theirs, f"{name}_token_id")
    assert (ours.vocab_size, ours.frame_ids, ours.mask_token) == (
        theirs.vocab_size,
        theirs.frame_ids,
        theirs.mask_token,
    )
    assert (ours.languages, ours.truncation_side) == (theirs.languages, theirs.truncation_side)
    assert (ours.all_chat_templates, ours.chat_template) == (theirs.all_chat_templates, theirs.chat_template)
    assert ours.template_variables == theirs.template_variables
    assert ours.special_texts() == theirs.special_texts()
    for text in map(str, texts):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.encode_input(text, TEXT) == theirs.encode_input(text, TEXT)
        assert ours.decode_tidy(ids) == theirs.decode_tidy(ids)
        assert ours.decode_tidy(ids, skip_special_tokens=False) == theirs.decode_tidy(ids, skip_special_tokens=False)
    messages = [{"role": "user", "content": "Hi", "name": None}, {"role": "assistant", "content": "Ho"}]
    for asked in ({}, {"add_generation_prompt": False, "continue_final_message": True}):
        assert ours.apply_chat_template(messages, **asked) == theirs.apply_chat_template(messages, **asked)


@pytest.mark.parametrize("name", sorted(GENERIC))
@pytest.mark.parametrize("kind", ["llama", "t5", "bert", None])
def test_a_tokenizer_json_alone_is_what_transformers_makes_of_it(tmp_path: Path, name: str, kind: str | None) -> None:
    demo_with(tmp_path, {"tokenizer_class": name}, kind)
    assert is_generic(tmp_path)
    assert_same(tokenizer_of(tmp_path), Tokenizer(AutoTokenizer.from_pretrained(str(tmp_path))))


@pytest.mark.parametrize("name", [*SETTINGS, *ODD])
def test_settings_are_read_as_transformers_reads_them(tmp_path: Path, name: str) -> None:
    demo_with(tmp_path, (SETTINGS | ODD)[name])
    ours = tokenizer_of(tmp_path)
    assert isinstance(ours._hf, PlainTokenizer) == (name in SETTINGS)
    assert_same(ours, Tokenizer(AutoTokenizer.from_pretrained(str(tmp_path))))


@pytest.mark.parametrize(
    ("settings", "config"),
    [
        ({"tokenizer_class": "LlamaTokenizerFast"}, {}),
        ({}, {}),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "auto_map": {"AutoTokenizer": ["a", "b"]}}, {}),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, {"model_type": "qwen2"}),
    ],
)
def test_other_folders_are_left_to_transformers(
    tmp_path: Path, settings: dict[str, object], config: dict[str, object]
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not is_generic(tmp_path)


@pytest.mark.slow
def test_a_server_reads_a_bundled_tokenizer_without_torch() -> None:
    """Neither its imports nor the tokenizer of a bundled model bring what takes seconds, or a lot of memory."""
    code = (
        "import sys; from server.assembly import import_app; import_app();"
        "from engine.text.processor import load_tokenizer; load_tokenizer(sys.argv[1]);"
        "assert not {'PIL.Image', 'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(DEMOS["chat"])], cwd=ROOT, check=True, timeout=300)
