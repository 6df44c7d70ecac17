"""What the finished models can do, measured through Octavo's own engine on what training never saw."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from demo import calls, chat, facts, questions, talk
from demo.names import any_name, is_held_out_pair, name
from demo.seq2seq_task import pair
from demo.stories import capital, tell
from demo.words import a, at
from engine import LLM, RequestOutput, SamplingParams

Messages = list[dict[str, Any]]
MAX_TOKENS = 200


@dataclasses.dataclass(frozen=True)
class Case:
    """A conversation and what makes its next answer right.

    Attributes:
        messages: ends with the user.
        answers: the answer has to be one of these, if there are any.
        parts: the answer has to contain all of these.
        tools: that may be called.
    """

    messages: Messages
    answers: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    tools: tuple[calls.Tool, ...] = ()

    def is_right(self, answer: str) -> bool:
        """Whether an answer is."""
        return (not self.answers or answer in self.answers) and all(part in answer for part in self.parts)


def messages(exchanges: Sequence[tuple[str, str]], asked: str) -> Messages:
    """A conversation in the form of the API."""
    turns = [(role, text) for one in exchanges for role, text in zip(("user", "assistant"), one, strict=True)]
    return [{"role": role, "content": text} for role, text in (*turns, ("user", asked))]


def greeted_by_name(state: chat.Talk) -> Case:
    """The user's name comes back at once."""
    asked, answer = chat.introduce(state)
    return Case(messages([], asked), parts=(state.user,)) if state.user in answer else greeted_by_name(state)


def name_remembered(state: chat.Talk) -> Case:
    """The user's name comes back after another question."""
    said = [chat.introduce(state), chat.ask_what(state)]
    return Case(messages(said, chat.ask_my_name(state)[0]), parts=(state.user,))


def fact_remembered(state: chat.Talk) -> Case:
    """What a user told comes back."""
    said = [chat.tell_own(state)]
    asked, answer = chat.ask_own(state)
    return Case(messages(said, asked), answers=(answer,))


def question_answered(state: chat.Talk) -> Case:
    """A topic and a phrasing that did, or did not, meet in training."""
    rng = state.rng
    while True:
        key, topic = rng.choice(list(facts.TOPICS.items()))
        phrasing = rng.choice(questions.ASK_WHAT)
        if is_held_out_pair(key, phrasing) == state.held_out:
            asked = capital(phrasing.format(x=rng.choice(topic.names)))
            return Case(messages([], asked), answers=(*topic.answers, *facts.WIDER_TOPICS[key].answers))


def asked_in_small_letters(state: chat.Talk) -> Case:
    """The same, typed in a hurry."""
    case = question_answered(state)
    return Case(messages([], case.messages[0]["content"].lower().rstrip("?.")), answers=case.answers)


def unusual_name(state: chat.Talk) -> Case:
    """A name with marks, digits or two parts comes back."""
    while True:
        called = any_name(state.rng, held_out=state.held_out)
        if not called.isascii() or not called.isalpha():
            return Case(messages([], f"My name is {called}."), parts=(called,))


def hero_made_up(state: chat.Talk) -> Case:
    """A story about what nobody has heard of."""
    hero = name(state.rng, held_out=state.held_out).lower()
    return Case(messages([], f"Tell me a story about {a(hero)}."), parts=(f" {hero} ",))


def story_told(state: chat.Talk) -> Case:
    """A story about a hero with a name, in a place: all three are in it."""
    story = tell(state.rng, held_out=state.held_out)
    about = f" about {a(story.hero)} named {story.name} {at(story.place)}"
    asked = state.rng.choice(talk.ASK_STORY).format(about=about)
    return Case(messages([], asked), parts=(story.name, story.hero, story.place))


def story_understood(state: chat.Talk) -> Case:
    """A question about a story that was told."""
    said = [chat.ask_story(state)]
    asked, answer = chat.ask_about_story(state)
    return Case(messages(said, asked), answers=(answer,))


CALCULATOR, FINDER = calls.Tool("calculate", "expression"), calls.Tool("look_up", "name")


def calculator_called(state: chat.Talk) -> Case:
    """A question about two numbers, and both tools to choose from."""
    use = calls.calculation(state.rng)
    call = CALCULATOR.call(use.argument)
    return Case(messages([], use.asked), answers=(call,), tools=(CALCULATOR, FINDER))


def name_looked_up(state: chat.Talk) -> Case:
    """A question about a name, and both tools to choose from."""
    use = calls.look_up(state.rng, name(state.rng, held_out=state.held_out))
    return Case(messages([], use.asked), answers=(FINDER.call(use.argument),), tools=(CALCULATOR, FINDER))


def result_told(state: chat.Talk) -> Case:
    """What a tool says is told."""
    rng = state.rng
    if rng.random() < 0.5:
        use, tool = calls.calculation(rng), CALCULATOR
    else:
        use, tool = calls.look_up(rng, name(rng, held_out=state.held_out)), FINDER
    function = {"name": tool.name, "arguments": {tool.parameter: use.argument}}
    said: Messages = [
        *messages([], use.asked),
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": use.result},
    ]
    return Case(said, answers=(use.answer,), tools=(CALCULATOR, FINDER))


def nothing_called(state: chat.Talk) -> Case:
    """A question that takes no tool, although there are some."""
    return dataclasses.replace(question_answered(state), tools=(CALCULATOR, FINDER))


KINDS: dict[str, Callable[[chat.Talk], Case]] = {
    "a name comes back at once": greeted_by_name,
    "a name with marks, digits or two parts comes back": unusual_name,
    "a name is remembered over another question": name_remembered,
    "a fact about the user is remembered": fact_remembered,
    "a question about a topic is answered": question_answered,
    "a question in small letters is answered": asked_in_small_letters,
    "a story is about a hero of a kind that does not exist": hero_made_up,
    "a story has the hero, the name and the place asked for": story_told,
    "a question about a story is answered": story_understood,
    "the calculator is called": calculator_called,
    "a name is looked up": name_looked_up,
    "a tool's result is told": result_told,
    "a question is answered without the tools": nothing_called,
}


def measure_chat(folder: Path, count: int) -> dict[str, dict[str, float]]:
    """Shares of right answers by greedy search.

    Args:
        folder: the model.
        count: cases of a kind, on held-out names and combinations and as many on known ones.
    """
    shares: dict[str, dict[str, float]] = {}
    ended = total = 0
    with closing(LLM(str(folder), show_progress=False)) as llm:
        for kind, make in KINDS.items():
            shares[kind] = {}
            for column, held_out in (("held out", True), ("known", False)):
                states = [chat.Talk(random.Random(f"{kind} {number} {held_out}"), held_out) for number in range(count)]
                cases = [make(state) for state in states]
                outputs = ask(llm, [case.messages for case in cases], tools=cases[0].tools)
                right = sum(case.is_right(text_of(output)) for case, output in zip(cases, outputs, strict=True))
                ended += sum(output.outputs[0].finish_reason == "stop" for output in outputs)
                total += count
                shares[kind][column] = round(right / count, 3)
    shares["the answer ends by itself"] = {"all": round(ended / total, 3)}
    return shares


def ask(
    llm: LLM,
    conversations: Sequence[Messages],
    params: SamplingParams | None = None,
    tools: Sequence[calls.Tool] = (),
) -> list[RequestOutput]:
    """The next answers, by greedy search unless told otherwise."""
    params = params or SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    described = [tool.described for tool in tools] or None
    texts = [tokenizer.apply_chat_template(one, tools=described) for one in conversations]
    return llm.generate([tokenizer.encode(text, add_special_tokens=False) for text in texts], params)


def text_of(output: RequestOutput) -> str:
    """The first answer."""
    return output.outputs[0].text


def measure_seq2seq(folder: Path, count: int, beams: int = 4) -> dict[str, dict[str, float]]:
    """Shares of held-out sentences whose translation is the best one, by greedy search and by beam search, apart for
    sentences whose first word leads greedy search astray."""
    pairs = [pair(number, held_out=True) for number in range(1000, 1000 + 2 * count)]
    groups = {
        "the best translation begins with the likeliest word": [one for one in pairs if not one.split][:count],
        "it does not": [one for one in pairs if one.split][:count],
    }
    shares: dict[str, dict[str, float]] = {}
    with closing(LLM(str(folder), show_progress=False)) as llm:
        for group, members in groups.items():
            shares[group] = {"sentences": len(members)}
            searches: dict[str, dict[str, Any]] = {
                "greedy": {},
                f"{beams} beams": {"num_beams": beams},
                f"{beams} beams, length_penalty 0": {"num_beams": beams, "length_penalty": 0.0},
            }
            for column, search in searches.items():
                params = SamplingParams(temperature=0.0, max_tokens=64, **search)
                outputs = llm.generate([one.source for one in members], params)
                right = sum(text_of(output) == one.best for output, one in zip(outputs, members, strict=True))
                shares[group][column] = round(right / max(1, len(members)), 3)
    return shares
