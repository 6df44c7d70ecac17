"""POST /translate and GET /languages, in LibreTranslate's shape: translations are the reference's, a list one batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
from support.text_seq2seq import TEXTS, TextCheckpoint
from test_http_seq2seq import Api, served

from server.routes.translate import _further

MOST = 95  # tokens of a translation of these models: the context of 96, less the decoder's start


@pytest.fixture(scope="module")
def m2m100(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Few pages, so that a list is preempted."""
    folder = tmp_path_factory.mktemp("m2m100")
    with served("m2m100", folder, "--num-gpu-blocks-override", "120") as api:
        yield api


@pytest.fixture(scope="module")
def small100(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with served("small100", tmp_path_factory.mktemp("small100")) as api:
        yield api


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with served("marian", tmp_path_factory.mktemp("marian")) as api:
        yield api


@pytest.fixture(scope="module")
def plbart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with served("plbart", tmp_path_factory.mktemp("plbart")) as api:
        yield api


def translate(api: Api, **body: Any) -> dict[str, Any]:
    answer = api.post("/translate", **body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def expected(one: TextCheckpoint, text: str, mark: str, first: str | None, **how: Any) -> list[str]:
    """The reference's translations of a text whose input is marked by one language, and whose answer another begins."""
    one.tokenizer.src_lang = mark
    code = None if first is None else one.tokenizer.get_lang_id(first)
    settings = {"num_beams": 1, "max_new_tokens": MOST, "forced_bos_token_id": code} | how
    return [one.text(answer).strip() for answer in one.generate(one.encode(text), **settings)]


@pytest.mark.slow
def test_a_list_is_one_batch(m2m100: Api) -> None:
    one = m2m100.checkpoint
    names = ("encoder_runs", "steps", "num_preemptions")
    before = {name: m2m100.service.metric(f"octavo_{name}_total") for name in names}
    body = translate(m2m100, q=TEXTS, source="en", target="de")
    wanted = [expected(one, text, "en", "de")[0] for text in TEXTS]
    assert body == {"translatedText": wanted}
    grown = {name: m2m100.service.metric(f"octavo_{name}_total") - count for name, count in before.items()}
    assert grown["encoder_runs"] >= len(TEXTS)
    assert grown["num_preemptions"] > 0
    assert grown["steps"] < 2 * MOST, "the texts did not share steps"
    assert len(set(wanted)) > 3
    assert translate(m2m100, q=TEXTS[0], source="en", target="de") == {"translatedText": wanted[0]}
    other = translate(m2m100, q=TEXTS[0], source="ro", target="zu")
    assert other == {"translatedText": expected(one, TEXTS[0], "ro", "zu")[0]}
    assert other["translatedText"] != wanted[0]


def test_alternatives_are_further_beams(m2m100: Api) -> None:
    one, how = m2m100.checkpoint, {"num_beams": 3, "num_return_sequences": 3}
    wanted = [expected(one, text, "en", "fr", **how) for text in TEXTS[:3]]
    asked = {"source": "en", "target": "fr", "alternatives": 2, "format": "text"}
    body = translate(m2m100, q=TEXTS[:3], **asked)
    assert body["translatedText"] == [texts[0] for texts in wanted]
    told = [[*dict.fromkeys(texts)][1:] for texts in wanted]
    assert body["alternatives"] == told
    assert min(map(len, told)) < 2, "no two beams are the same text"
    alone = translate(m2m100, q=TEXTS[1], **asked)
    assert alone == {"translatedText": wanted[1][0], "alternatives": told[1]}
    assert "alternatives" not in translate(m2m100, q=TEXTS[1], source="en", target="fr", alternatives=0)


def test_alternatives_are_told_once() -> None:
    """Different tokens may be the same text, and no text is no translation."""
    assert _further(["a", "b", "a", "", "b", "c"]) == ["b", "c"]
    assert _further(["", "", "a"]) == ["a"]
    assert _further(["a"]) == []


def test_completions_name_the_same_languages(m2m100: Api) -> None:
    asked = {"prompt": TEXTS[0], "temperature": 0, "max_tokens": MOST, "src_lang": "ro", "tgt_lang": "zu"}
    (text,) = m2m100.texts(**asked)
    assert text.strip() == expected(m2m100.checkpoint, TEXTS[0], "ro", "zu")[0]
    assert m2m100.refused(**(asked | {"src_lang": "__ro__"}))["param"] == "src_lang"


@pytest.mark.slow
def test_a_model_whose_input_names_the_target(small100: Api) -> None:
    """SMaLL-100: the source language changes nothing, and may be left to the model."""
    one = small100.checkpoint
    for target in ("de", "zu"):
        wanted = expected(one, TEXTS[0], target, None)[0]
        for source in ("auto", "en", "fr"):
            assert translate(small100, q=TEXTS[0], source=source, target=target) == {"translatedText": wanted}
        (text,) = small100.texts(prompt=TEXTS[0], temperature=0, max_tokens=MOST, tgt_lang=target)
        assert text.strip() == wanted
    asked = {"prompt": TEXTS[0], "tgt_lang": "de"}
    assert "Remove it" in small100.refused(**asked, src_lang="en")["message"]
    assert small100.refused(**(asked | {"prompt": [5, 6]}))["param"] == "tgt_lang"
    assert small100.refused("/translate", q="sea", source="xx", target="de")["param"] == "source"


@pytest.mark.slow
def test_a_model_whose_decoder_begins_with_the_target(plbart: Api) -> None:
    """PLBART, although its configs begin answers with EOS, or name no start."""
    one, found = plbart.checkpoint, set()
    for source, target in (("java", "en_XX"), ("python", "java")):
        one.tokenizer.src_lang = f"__{source}__"
        code = one.tokenizer.lang_code_to_id[f"__{target}__"]
        (answer,) = one.generate(one.encode(TEXTS[0]), decoder_start_token_id=code, num_beams=1, max_new_tokens=MOST)
        wanted = one.text(answer).strip()
        assert translate(plbart, q=TEXTS[0], source=source, target=target) == {"translatedText": wanted}
        named = {"prompt": TEXTS[0], "src_lang": source, "tgt_lang": target}
        body = plbart.complete(**named, temperature=0, max_tokens=MOST, return_token_ids=True)
        assert body["choices"][0]["token_ids"] == answer
        found.add(wanted)
    assert len(found) == 2
    error = plbart.refused(**named, decoder_start_token_id=2)
    assert "both set the decoder's first token" in error["message"]


@pytest.mark.slow
def test_a_model_of_one_pair(marian: Api) -> None:
    """Languages are those that the tokenizer's config names."""
    assert marian.http.get("/languages").json() == [{"code": "en", "name": "en", "targets": ["de"]}]
    one = marian.checkpoint
    (answer,) = one.generate(one.encode(TEXTS[0]), num_beams=1, max_new_tokens=MOST)
    for source in ("en", "auto"):
        assert translate(marian, q=TEXTS[0], source=source, target="de")["translatedText"] == one.text(answer).strip()
    error = marian.refused("/translate", q="sea", source="de", target="en")
    assert (error["param"], error["code"]) == ("source", "invalid_value")
    assert "translates en to de only" in error["message"]


def test_languages(m2m100: Api) -> None:
    found = m2m100.http.get("/languages").json()
    codes = [one["code"] for one in found]
    assert len(codes) == 100
    assert {"en", "de", "zu", "ast"} <= set(codes)
    assert found[0]["targets"] == codes[1:]
    (card,) = m2m100.http.get("/v1/models").json()["data"]
    assert card["endpoints"] == ["/v1/completions", "/translate"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"source": "auto"}, "source", "does not detect languages"),
        ({"source": "eng_Latn"}, "source", "does not have the language 'eng_Latn'; it has"),
        ({"target": "auto"}, "target", "does not have"),
        ({"format": "html"}, "format", "format must be text, got 'html': markup"),
        ({"format": "xml"}, "format", "format must be text, got 'xml'"),
        ({"q": []}, "q", ""),
        ({"q": ["a", 1]}, None, ""),
        ({"q": "night " * 5000}, "q", "encoder is 96 tokens"),
        ({"alternatives": -1}, "alternatives", ""),
        ({"alternatives": 10_000}, "alternatives", "at most"),
        ({"tgt_lang": "de"}, "tgt_lang", "not supported"),
        ({"source": None}, "source", ""),
    ],
)
def test_what_is_refused(m2m100: Api, fields: dict[str, Any], param: str | None, words: str) -> None:
    error = m2m100.refused("/translate", **({"q": "the sea", "source": "en", "target": "de"} | fields))
    assert param is None or error["param"] == param
    assert words in error["message"]


def test_what_is_not_read_is_said(m2m100: Api) -> None:
    answer = m2m100.post("/translate", q="sea", source="en", target="de", api_key="none", colour="red")
    assert answer.status_code == 200
    assert answer.headers["X-Octavo-Ignored-Fields"] == "colour"


def post_form(api: Api, content: str, **headers: str) -> httpx.Response:
    """As LibreTranslate's client in Python and `curl -d` do it."""
    sent = {"Content-Type": "application/x-www-form-urlencoded", **headers}
    return api.http.post("/translate", content=content, headers=sent)


def test_forms(m2m100: Api) -> None:
    text = "Bücher & 50% + night = 夜"
    asked = {"q": text, "source": "en", "target": "de"}
    answer = post_form(m2m100, urlencode(asked | {"api_key": "none"}))
    assert answer.status_code == 200, answer.text
    assert answer.json() == translate(m2m100, **asked)
    several = [
        ("q", TEXTS[0]),
        ("q", text),
        ("source", "en"),
        ("target", "de"),
        ("alternatives", "1"),
        ("format", "text"),
    ]
    answer = post_form(m2m100, urlencode(several))
    assert answer.json() == translate(m2m100, **(asked | {"q": [TEXTS[0], text], "alternatives": 1}))
    sent = {"Content-Type": "application/x-www-form-urlencoded"}
    codes = m2m100.http.request("GET", "/languages", content="api_key=none", headers=sent)
    assert codes.json() == m2m100.http.get("/languages").json()


def test_forms_of_parts(m2m100: Api) -> None:
    """As LibreTranslate's web page sends them."""
    asked = {"q": "Bücher & night = 夜", "source": "en", "target": "de"}
    sent = asked | {"format": "", "alternatives": "1", "api_key": ""}
    parts: list[tuple[str, Any]] = [(name, (None, value)) for name, value in sent.items()]
    answer = m2m100.http.post("/translate", files=parts)
    assert answer.status_code == 200, answer.text
    assert answer.json() == translate(m2m100, **asked, alternatives=1)
    several = m2m100.http.post("/translate", files=[*parts, ("q", (None, TEXTS[0]))]).json()
    assert several == translate(m2m100, **(asked | {"q": [asked["q"], TEXTS[0]], "alternatives": 1}))
    for wrong, words in ((parts[1:], "q is required"), ([*parts, ("file", b"sea")], "file is a file")):
        answer = m2m100.http.post("/translate", files=wrong)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        ("source=en&target=de", 400, "q is required"),
        ('{"q": "sea", "source": "en", "target": "de"}', 400, "is required"),
        ("q=sea&source=en&target=de&alternatives=many", 400, "alternatives: "),
        ("q=sea&source=en&source=de&target=de", 400, "source: "),
        ("q=%ff&source=en&target=de", 400, "not valid UTF-8"),
        ("q=" * 5 + "&" * 5000, 400, "more than"),
        ("q=" + "night%20" * 20_000 + "&source=en&target=de", 400, "encoder is 96 tokens"),
        ("q=" + "a" * (16 << 20), 413, "max_body_size"),
    ],
    ids=["missing", "json", "number", "twice", "bytes", "fields", "long", "large"],
)
def test_forms_that_are_refused(m2m100: Api, content: str, status: int, words: str) -> None:
    answer = post_form(m2m100, content)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def test_forms_of_other_sites_are_refused(m2m100: Api) -> None:
    """What a browser sends for a page of another site, without asking first."""
    for origin in ("https://evil.example", "null"):
        answer = post_form(m2m100, "q=sea&source=en&target=de", Origin=origin)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
