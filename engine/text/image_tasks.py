"""The text that an encoder reads after an image: a task's name stands for a sentence
(arXiv:2311.06242)."""

from __future__ import annotations

from engine.errors import InvalidRequestError
from engine.text.tokenizer import Tokenizer

_ALONE = {
    "<OCR>": "What is the text in the image?",
    "<OCR_WITH_REGION>": "What is the text in the image, with regions?",
    "<CAPTION>": "What does the image describe?",
    "<DETAILED_CAPTION>": "Describe in detail what is shown in the image.",
    "<MORE_DETAILED_CAPTION>": "Describe with a paragraph what is shown in the image.",
    "<OD>": "Locate the objects with category name in the image.",
    "<DENSE_REGION_CAPTION>": "Locate the objects in the image, with their descriptions.",
    "<REGION_PROPOSAL>": "Locate the region proposals in the image.",
}
_WITH_INPUT = {
    "<CAPTION_TO_PHRASE_GROUNDING>": "Locate the phrases in the caption: {input}",
    "<REFERRING_EXPRESSION_SEGMENTATION>": "Locate {input} in the image with mask",
    "<REGION_TO_SEGMENTATION>": "What is the polygon mask of region {input}",
    "<OPEN_VOCABULARY_DETECTION>": "Locate {input} in the image.",
    "<REGION_TO_CATEGORY>": "What is the region {input}?",
    "<REGION_TO_DESCRIPTION>": "What does the region {input} describe?",
    "<REGION_TO_OCR>": "What text is in the region {input}?",
}


def sentence_of(text: str) -> str:
    """A text with its task's name replaced. Raises InvalidRequestError if there is more text beside the name of a task
    that takes none."""
    for task, sentence in _ALONE.items():
        if task in text:
            if text != task:
                raise InvalidRequestError(
                    f"the task {task} must be the whole text beside the image, without further text or spaces.",
                    param="prompt",
                    code="invalid_value",
                )
            return sentence
    for task, sentence in _WITH_INPUT.items():
        if task in text:
            return sentence.replace("{input}", text.replace(task, "").strip())
    return text


def encode_task(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens that follow an image: a sentence between the special tokens of a text's beginning and end."""
    begin, end = (
        "" if token is None else tokenizer.written(token) for token in (tokenizer.bos_token_id, tokenizer.eos_token_id)
    )
    return tokenizer.encode(f"{begin}{sentence_of(text)}{end}", add_special_tokens=False)
