"""The models' cards: what they are, made of, good for and bad at, with the figures of their training."""

from __future__ import annotations

from collections.abc import Sized
from contextlib import closing
from pathlib import Path
from typing import Any

from demo import facts, folian, questions, words
from demo.chat_task import TEMPERATURE
from demo.evaluation import MAX_TOKENS, ask, text_of
from demo.plot import perplexity_chart
from demo.seq2seq_task import pair
from engine import LLM, CompletionOutput, SamplingParams

PLOT = "training.svg"

CHAT = """\
---
license: apache-2.0
language: en
---

# Octavo's demo model for chat

A tiny transformer that comes with Octavo, so that a server answers in English at once, without a download. It
tells little stories, answers short questions about Octavo and about transformers, and remembers the user's name.
It is a toy: outside of that it knows nothing, and says so at best.

    octavo serve                # or: octavo serve --demo chat

## The model

LLaMA's shape: {layers} layers, hidden size {hidden}, {heads} heads over {kv_heads} key-value heads, feed-forward
{ffn}, {parameters} parameters, stored in bfloat16 ({megabytes} MB in all) and computed in float32. Context
{context} tokens. Byte-level BPE of {vocab} tokens, trained on the corpus; any text can be encoded. The chat
template knows the roles system, user, assistant and tool, and shows tools by their names and parameters.

## Data

All of it is made up by the scripts in `tools/demo/`; no outside text was used. A document is a story of a grammar
(ten plots, {heroes} heroes, {places} places, {things} things), or a conversation of one to four exchanges:
introductions, things to remember, questions about {topics} topics in {phrasings} phrasings, questions about the
use of the server, small talk, stories asked for by hero, name, place, thing or theme, questions about a story,
and questions that it cannot know. Names are made of syllables, so that there are too many to learn by heart. The
third part of the training adds {more_heroes} heroes and some that do not exist, {more_places} places,
{more_topics} topics, {more_phrasings} phrasings, names with marks, digits, two parts or other letters, greetings in
other languages, and questions as people type them: in small letters, in capitals, without a stop. Half of the fourth
part's documents have tools, under several names: a calculator and something to look names up in, which are called
where a question needs them, and whose results are told.

Held out from training by the checksum of their letters: one name in eight, one pair of hero and place in ten, one
pair of topic and phrasing in ten. SHA-256 of the first {digest_count} documents of each of its four
parts: `{digest}`.

## Training

`python tools/train_demo.py chat`: {steps} steps of {rows} rows of {length} tokens, {million_tokens} million
tokens, none twice. AdamW, {warmup} steps of warm-up to {peak_rate:g}, then a cosine; weight decay {decay:g};
gradients clipped at {clip:g}; cross-entropy over the assistant's tokens with label smoothing {smoothing:g} in the
first {smoothed:.0%} of the steps before the third part, and without afterwards, since a smoothed model would draw
wrong tokens at temperature 1. From step {second} on the documents are of a second part, in which what has to be
looked up stands close together: the beginnings of stories, to learn who they are about, and questions that take
up an earlier turn.
From step {third} on they are of the third part, with another warm-up to {third_rate:g} and another cosine, and from
step {fourth} on of the fourth part, with a warm-up to {fourth_rate:g} and a third cosine; the fourth part began with
the weights in bfloat16 that the third one had given, and new moments (`--begin-with`).
Matrix products in {precision}. It took {minutes} minutes of processor time, on a CPU, in {threads} thread(s).{resumed}

![perplexity](training.svg)

{curve}

Perplexity a token at the end: **{held_out} on held-out** names and combinations, {fresh} on new documents of
known ones. Most of what is left is free choice: which hero, which thing, which turn the story takes.

## What it can do

Greedy search, {count} cases a row and column. "Held out": names and combinations that training never had.

{shares}

## Samples

{samples}

## Limits

- It knows some eighty facts and ten plots. Asked for anything else it says that it does not know, or answers beside
  the point; it knows no language but English, and cannot count without a tool, translate or write programs.
- Its stories are coherent from one sentence to the next, and say little. Pronouns may change. Where a request names no
  temperature, answers are drawn at {temperature:g} (`generation_config.json`); at 1 many stories have a broken name, or
  lose their thread.
- It follows no instructions from the system message.
- Of tools it knows a calculator for two numbers and a look-up of names; other functions it calls wrongly, if at all.
- It has seen rows of {length} tokens: in longer conversations the beginning may be forgotten.
- Names of unusual letters, long ones above all, may come back with a letter changed.
"""

SEQ2SEQ = """\
---
license: apache-2.0
---

# Octavo's demo model for translation

A tiny encoder-decoder of T5's shape that comes with Octavo. It translates Folian, a small invented language, into
English, and shows what beam search is good for.

    octavo serve --demo seq2seq

## The model

T5's shape: {layers} encoder and {layers} decoder layers, hidden size {hidden}, {heads} heads, feed-forward {ffn},
{parameters} parameters, stored in bfloat16 ({megabytes} MB in all) and computed in float32. Inputs of up to
{context} tokens. Byte-level BPE of {vocab} tokens over both languages.

## The language

The verb stands at the end, places before the object, adjectives after the noun; `li` is "the", `no` "not", `ke`
opens a question, `e` is "and", `ma` is "but". -s is plural, -n marks the object; -ar is present, -et past, -ur
future. Names stay.

{lexicon}

Some words have several translations, each with its share in training. `luma` is "Later" in 46 sentences of 100,
and "After a while", "After some time" or "After that" in 18 each: "After" is the likeliest first word, but
"Later" begins the likeliest sentence. Greedy search takes the first, beam search finds the second.

## Data and training

`python tools/train_demo.py seq2seq`: {steps} steps of {rows} sentences that a grammar made up
(`tools/demo/folian.py`), {million_tokens} million tokens of input, no sentence on purpose twice. Held out: one
name in eight, and one pair of subject and verb in ten. SHA-256 of the first {digest_count} pairs: `{digest}`.
AdamW, {warmup} steps of warm-up to {peak_rate:g}, then a cosine; gradients clipped at {clip:g}; cross-entropy
with label smoothing {smoothing:g} in the first {smoothed:.0%} of the steps. Matrix products in {precision}. It
took {minutes} minutes of processor time, on a CPU, in {threads} thread(s).{resumed}

![perplexity](training.svg)

{curve}

Perplexity a token of the translations, on held-out sentences: **{held_out}**. Perfect would not be 1: which
synonym is meant cannot be known.

## What it can do

Share of held-out sentences translated exactly by the likeliest words:

{shares}

## Samples

{samples}

## Limits

- Names that it has not seen come back with a letter changed now and then; most of the mistakes above are of that kind.
- Beams are ranked by log-probability / length ** length_penalty. With the usual length_penalty of 1, a longer beginning
  such as "Many a day" may come out above the likelier "Often"; `"length_penalty": 0` ranks by likelihood alone.
- In two clauses it may mix up which word belongs where.
- It knows the {words} words above and names; anything else becomes a word that it knows, or letters. Names of more
  than eight letters, and sentences of more than two clauses, are longer than what it has seen."""


def write_plot(folder: Path, training: dict[str, Any]) -> None:
    """training.svg: perplexities against tokens."""
    curve = training["curve"]
    tokens = [entry["step"] * training["tokens"] / training["steps"] for entry in curve]
    names = [name for name in ("held_out", "fresh") if name in curve[-1]]
    lines = {name.replace("_", " "): [entry[name] for entry in curve] for name in names}
    (folder / PLOT).write_text(perplexity_chart(tokens, lines), encoding="utf-8")


def table(rows: list[list[str]]) -> str:
    """Markdown; the first row is the head."""
    head, *rest = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *rest])


def curve_table(training: dict[str, Any], most: int = 10) -> str:
    """Some measurements, evenly spread, the last among them."""
    curve = training["curve"]
    every = -(-len(curve) // most)
    chosen = curve[::-1][::every][::-1]
    keys = list(chosen[0])
    return table([[key.replace("_", " ") for key in keys], *([f"{entry[key]:g}" for key in keys] for entry in chosen)])


def share_table(shares: dict[str, dict[str, float]]) -> str:
    """One row a kind."""
    columns = list(dict.fromkeys(column for row in shares.values() for column in row))
    shown = [
        [kind, *(_share(column, row[column]) if column in row else "" for column in columns)]
        for kind, row in shares.items()
    ]
    return table([["", *columns], *shown])


def told_of(resumed: list[int]) -> str:
    """A sentence about a run that was not one, and nothing about one that was."""
    steps = ", ".join(map(str, resumed))
    return f"\nThe run was ended, and taken up again after these steps: {steps}." if resumed else ""


def _share(column: str, value: float) -> str:
    return f"{value:g}" if column == "sentences" else f"{value:.1%}"


def chat_samples(folder: Path) -> str:
    """A prompt and a chat, by greedy search, two samples and beam search."""
    ways = {
        "greedy": SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
        "temperature 0.7, seed 1": SamplingParams(temperature=0.7, seed=1, max_tokens=MAX_TOKENS),
        "temperature 0.7, seed 2": SamplingParams(temperature=0.7, seed=2, max_tokens=MAX_TOKENS),
        "temperature 1, seed 1": SamplingParams(temperature=1.0, seed=1, max_tokens=MAX_TOKENS),
        "4 beams": SamplingParams(temperature=0.0, num_beams=4, max_tokens=MAX_TOKENS),
    }
    asked = (
        "What is a KV cache?", "Explain beam search in one sentence.", "My name is Zorblax.",
        "Tell me a story about a fox named Ada.", "What is the capital of France?",
    )  # fmt: skip
    lines = ['`/v1/completions`, prompt "Once upon a time":', ""]
    with closing(LLM(str(folder), show_progress=False)) as llm:
        for way, params in ways.items():
            lines += [f"- {way}: Once upon a time{text_of(llm.generate(['Once upon a time'], params)[0])}"]
        lines += ["", "`/v1/chat/completions`, greedy:", ""]
        for question in asked:
            answer = text_of(ask(llm, [[{"role": "user", "content": question}]])[0])
            lines += [f"- {question} — *{answer}*"]
    return "\n".join(lines)


def logprob(output: CompletionOutput) -> str:
    """The logarithm of an answer's probability."""
    return f"{output.cumulative_logprob or 0.0:.2f}"


def seq2seq_samples(folder: Path, count: int = 3) -> str:
    """Held-out sentences, by greedy search and the beams with their scores."""
    chosen = [one for one in (pair(number, held_out=True) for number in range(200)) if one.split][:count]
    lines: list[str] = []
    with closing(LLM(str(folder), show_progress=False)) as llm:
        for one in chosen:
            greedy = llm.generate([one.source], SamplingParams(temperature=0.0, max_tokens=64))[0].outputs[0]
            beams = SamplingParams(temperature=0.0, max_tokens=64, num_beams=4, n=4)
            lines += [f"`{one.source}`", "", f"- greedy ({logprob(greedy)}): {greedy.text}"]
            outputs = llm.generate([one.source], beams)[0].outputs
            lines += [f"- beam {n} ({logprob(beam)}): {beam.text}" for n, beam in enumerate(outputs, 1)]
            lines.append("")
    return "\n".join([*lines, "In brackets: the log-probability of the translation."])


def lexicon() -> str:
    """The words of Folian with their translations, one line a kind."""
    groups = {
        "who": folian.WHO, "what": folian.WHAT, "kinds": folian.KINDS, "times": folian.WHEN,
    }  # fmt: skip
    lines = [
        f"- {kind}: " + ", ".join(f"{word} {'/'.join(text for text, _ in shares)}" for word, shares in words.items())
        for kind, words in groups.items()
    ]
    lines.append("- places: " + ", ".join(f"{word} {english}" for word, english in folian.WHERE.items()))
    lines.append("- near: " + ", ".join(f"{word} {english}" for word, english in folian.HOW_NEAR.items()))
    verbs = (folian.TO_DO | folian.TO_BE).items()
    lines.append("- verbs: " + ", ".join(f"{stem}- {forms[0]}" for stem, forms in verbs))
    return "\n".join(lines)


def count_words() -> int:
    """How many words the lexicon has."""
    groups: tuple[Sized, ...] = (
        folian.WHO, folian.WHAT, folian.KINDS, folian.WHEN, folian.WHERE, folian.HOW_NEAR, folian.TO_DO, folian.TO_BE,
    )  # fmt: skip
    return sum(map(len, groups))


def write_card(folder: Path, model: str, training: dict[str, Any], shares: dict[str, dict[str, float]]) -> None:
    """README.md of a model.

    Args:
        folder: with the model in it.
        model: chat or seq2seq.
        training: what training.json holds.
        shares: what the evaluation gave.
    """
    write_plot(folder, training)
    last, recipe, shape = training["curve"][-1], training["recipe"], training["shape"]
    size = sum(file.stat().st_size for file in folder.iterdir() if file.name != "README.md")
    common = {
        **shape, **recipe, "parameters": f"{training['parameters'] / 1e6:.2f} million",
        "megabytes": f"{size / 1e6:.1f}",
        "precision": "bfloat16" if recipe["bfloat16"] else "float32", "minutes": round(training["cpu_seconds"] / 60),
        "threads": training["threads"], "million_tokens": f"{training['tokens'] / 1e6:.1f}",
        "digest": training["digest"], "digest_count": training["digest_count"],
        "curve": curve_table(training), "shares": share_table(shares),
        "held_out": f"{last['held_out']:.2f}", "count": training["cases"], "resumed": told_of(training["resumed"]),
    }  # fmt: skip
    if model == "chat":
        text = CHAT.format(
            **common, fresh=f"{last['fresh']:.2f}", samples=chat_samples(folder), heroes=len(words.HEROES),
            more_heroes=len(words.MORE_HEROES), more_places=len(words.MORE_PLACES),
            more_topics=len(facts.WIDER_TOPICS) - len(facts.TOPICS), more_phrasings=len(questions.MORE_ASK_WHAT),
            places=len(words.PLACES), temperature=TEMPERATURE, things=len(words.THINGS), topics=len(facts.TOPICS),
            phrasings=len(questions.ASK_WHAT) + len(questions.ASK_HOW) + len(questions.ASK_WHY),
        )  # fmt: skip
    else:
        text = SEQ2SEQ.format(**common, samples=seq2seq_samples(folder), lexicon=lexicon(), words=count_words())
    lines = [line.rstrip() for line in text.strip().splitlines()]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
