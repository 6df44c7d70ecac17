"""Extractive question answering as transformers 4 published it, the oracle of ours: version 5 has the pipeline no more.

What it made of a window's numbers is still there, in the pipeline for documents' images, and is used from there.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from transformers.pipelines.document_question_answering import select_starts_ends


def reference_answers(
    model: Any,
    tokenizer: Any,
    question: str,
    context: str,
    *,
    top_k: int = 1,
    max_answer_len: int = 15,
    max_seq_len: int = 384,
    doc_stride: int = 128,
    handle_impossible_answer: bool = False,
    align_to_words: bool = True,
) -> list[dict[str, Any]]:
    """The answers of one question, best first: score, start, end, answer."""
    tokenizer = copy.deepcopy(tokenizer)  # truncation is a setting that would stay
    windows = tokenizer(
        question,
        context,
        truncation="only_second",
        max_length=max_seq_len,
        stride=doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    least, found = 1_000_000.0, []
    for number in range(len(windows["input_ids"])):
        encoding = windows[number]
        inputs = {name: torch.tensor([windows[name][number]]) for name in tokenizer.model_input_names}
        with torch.no_grad():
            output = model(**inputs)
        outside = np.array([[owner != 1 for owner in encoding.sequence_ids]]).astype(int)
        if tokenizer.cls_token_id is not None:
            outside[np.array([encoding.ids]) == tokenizer.cls_token_id] = 0
        starts, ends, scores, least = select_starts_ends(
            output.start_logits.numpy(),
            output.end_logits.numpy(),
            outside,
            np.ones_like(outside),
            min_null_score=least,
            top_k=2 * top_k + 10 if align_to_words else top_k,
            handle_impossible_answer=handle_impossible_answer,
            max_answer_len=max_answer_len,
        )
        for first, last, score in zip(starts, ends, scores, strict=True):
            if not score:
                continue  # fillers, where there are fewer spans than asked for
            begin, end = encoding.offsets[first][0], encoding.offsets[last][1]
            if align_to_words and encoding.token_to_word(first) is not None:
                begin = encoding.word_to_chars(encoding.token_to_word(first), 1)[0]
                end = encoding.word_to_chars(encoding.token_to_word(last), 1)[1]
            text = context[begin:end]
            same = next((other for other in found if other["answer"].lower() == text.lower()), None)
            if same is None:
                found.append({"score": float(score), "start": begin, "end": end, "answer": text})
            else:
                same["score"] += float(score)
    if handle_impossible_answer:
        found.append({"score": least, "start": 0, "end": 0, "answer": ""})
    return sorted(found, key=lambda answer: -answer["score"])[:top_k]
