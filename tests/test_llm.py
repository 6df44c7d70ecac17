"""`LLM` as vLLM's users call it, with the bundled chat model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from engine import LLM, InvalidRequestError, SamplingParams
from server.config.settings import DEMOS

GREEDY = SamplingParams(temperature=0, max_tokens=8)
STORY = "Once upon a time"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with closing(LLM(str(DEMOS["chat"]), show_progress=False, device="cpu")) as made:
        yield made
        made.engine.check_integrity()


def test_prompts_come_as_texts_ids_and_dictionaries(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(STORY)
    (expected,) = llm.generate(STORY, GREEDY)
    assert expected.prompt == STORY
    assert expected.outputs[0].text
    for prompts in (
        ids,
        tuple(ids),
        np.array(ids),
        {"prompt": STORY},
        {"prompt": STORY, "multi_modal_data": None},
        {"prompt_token_ids": ids},
        {"prompt": "the ids count", "prompt_token_ids": np.array(ids)},
        [STORY],
        [ids],
        [{"prompt": STORY}],
        (STORY,),
        iter([STORY]),
    ):
        (answer,) = llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
        assert (answer.prompt_token_ids, answer.outputs) == (ids, expected.outputs), prompts
    mixed = llm.generate([{"prompt_token_ids": ids}, "Hello", {"prompt": STORY}], GREEDY)
    assert [answer.outputs[0].text for answer in mixed][::2] == [expected.outputs[0].text] * 2
    assert [answer.prompt for answer in mixed] == [None, "Hello", STORY]
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (3, "must be a text, a list of token ids, or a dictionary .* got int: 3"),
        (None, "got NoneType"),
        (b"bytes", "got bytes"),
        ([None], "got NoneType"),
        ([1, "a"], "got list"),
        ([[1, 2.5]], "got list"),
        ([True], "got bool"),
        ({}, "its keys are: none"),
        ({"prompt": None}, "its keys are: none"),
        ({"prompt": [1, 2]}, "prompt must be a text, .* Token ids go into prompt_token_ids"),
        ({"prompt_token_ids": "abc"}, "got str"),
        ({"text": "a"}, "unknown keys: text"),
        ([{"prompt": "a", "multi_modal_data": {"image": 1}}], "unknown keys: multi_modal_data"),
        ({"prompt": "a", "encoder_prompt": "b"}, "its keys are: prompt, encoder_prompt"),
        ({"encoder_prompt": "a"}, "a decoder-only model"),
    ],
)
def test_other_prompts_are_refused(llm: LLM, prompts: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        llm.generate(prompts, GREEDY)
    assert caught.value.param == "prompt"
    assert not llm.engine.has_unfinished_requests()
