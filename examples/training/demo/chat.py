"""Conversations, made up from `demo.talk`, `demo.facts`, `demo.questions` and the stories."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Sequence

from demo import facts, questions, talk, words
from demo.names import SCRIPTS, any_name, is_held_out_pair, name
from demo.stories import Story, capital, tell
from demo.words import a, at

Exchange = tuple[str, str]  # what the user says, and the answer


@dataclasses.dataclass
class Talk:
    """The conversation so far.

    Attributes:
        rng: decides what comes next.
        held_out: whether names and combinations are those that training never sees.
        user: the user's name, once told.
        own: question and answer about what the user has told.
        story: the story told last.
        wider: whether there is more to talk about, and more ways to type it: the third part of the training.
        names: all that were used; they are written as they are.
    """

    rng: random.Random
    held_out: bool = False
    user: str = ""
    own: tuple[tuple[str, ...], str] | None = None
    story: Story | None = None
    wider: bool = False
    names: list[str] = dataclasses.field(default_factory=list)

    def a_name(self) -> str:
        """Any name."""
        self.names.append((any_name if self.wider else name)(self.rng, held_out=self.held_out))
        return self.names[-1]

    def typed(self, text: str) -> str:
        """The user's text, as people type."""
        return hurried(self.rng, text, self.names) if self.wider else informal(self.rng, text, self.user)


def converse(rng: random.Random, *, held_out: bool = False, wider: bool = False) -> tuple[str, list[Exchange]]:
    """A system message, which may be "", and one to four exchanges."""
    system = rng.choice(talk.SYSTEM) if rng.random() < 0.25 else ""
    state = Talk(rng, held_out, wider=wider)
    exchanges: list[Exchange] = []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        kinds, weights = zip(*_KINDS, strict=True)
        told = [kind for kind in exchanges if len(kind[1]) > 300]
        kind = rng.choices(kinds, weights)[0]
        if kind is ask_story and len(told) > 1:
            kind = ask_what  # two stories fill a row
        if exchanges and rng.random() < 0.45:
            kind = _follow_up(state, kind)
        asked, answer = kind(state)
        exchanges.append((state.typed(asked), answer))
    return system, exchanges


def _follow_up(state: Talk, otherwise: Callable[[Talk], Exchange]) -> Callable[[Talk], Exchange]:
    choices: list[Callable[[Talk], Exchange]] = [otherwise]
    if state.user:
        choices += [ask_my_name] * 2
    if state.own:
        choices += [ask_own] * 2
    if state.story:
        choices += [ask_about_story] * 3 + [ask_another]
    return state.rng.choice(choices)


def informal(rng: random.Random, text: str, user: str) -> str:
    """As people type: now and then with a small letter, without the last stop, or after a greeting. A name at the
    beginning keeps its capital."""
    if rng.random() < 0.06:
        text = f"{rng.choice(('Hi', 'Hello', 'Hey', 'OK', 'Great', 'Thanks'))}{rng.choice((',', '!', '.'))} {text}"
    if rng.random() < 0.22 and text[-1] in ".?!":
        text = text[:-1]
    if rng.random() < 0.15 and not (user and text.startswith(user)):
        text = text[0].lower() + text[1:]
    return text


def hurried(rng: random.Random, text: str, names: Sequence[str]) -> str:
    """All in small letters, in capitals, with other ends, without an article.

    Names stay as they are, since the answer writes them so.
    """
    if rng.random() < 0.06:
        text = f"{rng.choice(('Hi', 'Hello', 'Hey', 'OK', 'Great', 'Thanks'))}{rng.choice((',', '!', '.'))} {text}"
    if rng.random() < 0.04:
        text = re.sub(r"\b(?:a|an|the) (?=[a-z])", "", text, count=1)
    end = rng.random()
    if end < 0.28 and text[-1] in ".?!":
        text = text[:-1] + ("" if end < 0.25 else rng.choice(("??", " ?", "!", "...", "?!")))
    way = rng.random()
    if way < 0.3:
        return _spelt(str.lower, text, names)
    if way < 0.38:
        return _spelt(str.upper, text, names)
    if way < 0.44:
        return _spelt(lambda part: re.sub(r"(?<![\w'-])[a-z]", lambda first: first[0].upper(), part), text, names)
    if way < 0.5 and not text.startswith(tuple(names)):
        return text[:1].lower() + text[1:]
    return text


def _spelt(change: Callable[[str], str], text: str, names: Sequence[str]) -> str:
    """All but the names changed."""
    if not names:
        return change(text)
    longest_first = sorted(names, key=len, reverse=True)
    parts = re.split("(" + "|".join(rf"\b{re.escape(one)}\b" for one in longest_first) + ")", text)
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def greet(state: Talk) -> Exchange:
    """Hello."""
    return state.rng.choice(talk.GREETINGS) + state.rng.choice(("!", ".", "", ", Octavo!")), state.rng.choice(
        talk.GREET_BACK
    )


def introduce(state: Talk) -> Exchange:
    """The user's name."""
    state.user = state.a_name()
    if state.rng.random() < 0.1:
        state.user = state.user.lower()  # as people write, and as the answer then writes it
        state.names.append(state.user)
    asked = state.rng.choice(talk.MY_NAME + (talk.MORE_MY_NAME if state.wider else ())).format(n=state.user)
    if state.rng.random() < 0.35:
        asked = f"{state.rng.choice(talk.GREETINGS)}{state.rng.choice((',', '!', '.'))} {asked}"
    ask = state.rng.random()
    if ask < 0.12:
        return f"{asked} {state.rng.choice(talk.ASK_MY_NAME)}", f"Your name is {state.user}."
    if ask < 0.2:
        return f"{asked} {state.rng.choice(talk.SMALL['who'][0])}", f"Hello, {state.user}! {talk.SMALL['who'][1][0]}"
    if state.wider and ask < 0.27:
        statement, _, later, answer = state.rng.choice([own for own in talk.OWN if "{n}" in own[0]])
        also = state.a_name()
        state.own = later, answer.format(n=also)
        asked = f"{asked[:-1] if asked[-1] == '.' else asked} and {statement.format(n=also)}"
    return asked, state.rng.choice(talk.NICE_TO_MEET).format(n=state.user)


def ask_my_name(state: Talk) -> Exchange:
    """The user's name, or an answer that it was not said."""
    asked = state.rng.choice(talk.ASK_MY_NAME)
    if not state.user:
        return asked, state.rng.choice(talk.NOT_TOLD)
    return asked, state.rng.choice(talk.YOUR_NAME_IS).format(n=state.user)


def tell_own(state: Talk) -> Exchange:
    """Something about the user."""
    statement, reply, questions, answer = state.rng.choice(talk.OWN)
    colour, food = state.rng.choice(talk.HUES), state.rng.choice(talk.EATS)
    slots = {
        "n": state.a_name(), "job": state.rng.choice(talk.JOBS), "colour": colour, "Colour": capital(colour),
        "food": food, "Food": capital(food),
    }  # fmt: skip
    state.own = questions, answer.format(**slots)
    return statement.format(**slots), capital(reply.format(**slots))


def ask_own(state: Talk) -> Exchange:
    """The facts that the user told about themselves."""
    if state.own is None:
        return tell_own(state)
    return state.rng.choice(state.own[0]), state.own[1]


def say(state: Talk) -> Exchange:
    """Words to be repeated, or somebody to be greeted."""
    if state.rng.random() < 0.4:
        someone = state.a_name()
        return state.rng.choice(talk.GREET_SOMEONE).format(n=someone), f"Hello, {someone}!"
    thing = f"{state.rng.choice(words.COLOURS)} {state.rng.choice(words.THINGS)}"
    phrase = state.rng.choice(
        (state.a_name(), thing, f"{state.a_name()} {state.a_name()}", f"{state.a_name()} {thing}")
    )
    return state.rng.choice(talk.SAY).format(x=phrase), f"{capital(phrase)}."


def small(state: Talk) -> Exchange:
    """Who are you, thanks, a joke."""
    asked, answers = state.rng.choice(list((talk.WIDER_SMALL if state.wider else talk.SMALL).values()))
    return state.rng.choice(asked), state.rng.choice(answers)


def use(state: Talk) -> Exchange:
    """How the server is used."""
    asked, answers, _ = state.rng.choice(questions.USE + (questions.MORE_USE if state.wider else ()))
    return state.rng.choice(asked), state.rng.choice(answers)


def ask_what(state: Talk) -> Exchange:
    """A question about a topic; some pairs of topic and phrasing are held out."""
    rng = state.rng
    topics = facts.WIDER_TOPICS if state.wider else facts.TOPICS
    what = questions.ASK_WHAT + (questions.MORE_ASK_WHAT if state.wider else ())
    while True:
        key, topic = rng.choice(list(topics.items()))
        if state.wider and rng.random() < 0.35:  # what is asked first: Octavo, and the usual name in the usual words
            key = "octavo" if rng.random() < 0.15 else key
            if is_held_out_pair(key, what[0]) == state.held_out:
                return what[0].format(x=topics[key].names[0]), rng.choice(topics[key].answers)
            continue
        kinds: list[tuple[tuple[str, ...], tuple[str, ...]]] = [(what, topic.answers)] * 4
        kinds += [(questions.ASK_HOW, topic.how)] * 2 if topic.how else []
        kinds += [(questions.ASK_HOW, topic.answers)] if state.wider and not topic.how else []
        kinds += [(questions.ASK_WHY, topic.why)] * 2 if topic.why else []
        phrasings, answers = rng.choice(kinds)
        phrasing = rng.choice(phrasings)
        if is_held_out_pair(key, phrasing) == state.held_out:
            return capital(phrasing.format(x=rng.choice(topic.names))), rng.choice(answers)


def unknown(state: Talk) -> Exchange:
    """A question that it cannot answer."""
    rng = state.rng
    how = rng.random() if state.wider else 1.0
    if how < 0.15:
        return rng.choice(talk.FOREIGN), rng.choice(talk.ENGLISH_ONLY)
    if how < 0.2:  # another language, as far as its letters go
        letters = rng.choice(SCRIPTS)
        lengths = [rng.randint(2, 7) for _ in range(rng.randint(1, 4))]
        text = " ".join("".join(rng.choice(letters) for _ in range(length)) for length in lengths)
        return text + rng.choice(("", "?", "!")), rng.choice(talk.ENGLISH_ONLY)
    if how < 0.25:  # letters without a meaning
        text = " ".join("".join(rng.choice("asdfghjklqwertyuiop") for _ in range(4)) for _ in range(rng.randint(1, 3)))
        return text, rng.choice(talk.DO_NOT_KNOW)
    someone = name(rng, held_out=state.held_out)
    slots = {"n": someone, "w": rng.choice(talk.WORLD), "v": rng.choice(talk.WORLD)}
    numbers = {"d": rng.randint(1, 99), "e": rng.randint(1, 99)}
    phrasings: tuple[str, ...] = talk.UNKNOWN
    if state.wider:
        phrasings += talk.MORE_UNKNOWN
        slots["job"] = rng.choice((*talk.JOBS, *talk.OFFICES))
    return rng.choice(phrasings).format(**slots, **numbers), rng.choice(talk.DO_NOT_KNOW)


def ask_story(state: Talk) -> Exchange:
    """A story, with some of what shall be in it."""
    rng = state.rng
    plot = thing = hero = called = ""
    how = rng.random()
    if how < 0.14:
        theme = rng.choice(list(words.THEMES))
        about, plot = f" about {theme}", words.THEMES[theme]
    elif how < 0.26:
        thing = rng.choice(words.THINGS)
        about = f" about {a(rng.choice(('', '', rng.choice(words.COLOURS) + ' ')) + thing)}"
    else:
        about = ""
        if state.wider and how < 0.92 and rng.random() < 0.15:
            hero = name(rng, held_out=state.held_out).lower()  # of a kind that does not exist
        elif state.wider and how < 0.92 and rng.random() < 0.35:
            called = state.a_name()
    story = tell(rng, held_out=state.held_out, hero=hero, called=called, plot=plot, thing=thing, wider=state.wider)
    state.names += [story.name, story.friend]
    if 0.26 <= how < 0.92:
        kind = a(rng.choice((story.hero, story.hero, f"{rng.choice(words.TEMPERS)} {story.hero}")))
        described, so = rng.random(), rng.choice(("named", "called"))
        if hero or called:  # what the story could not have by chance is asked for
            described *= 0.85 if hero else 0.55
        named = f"{kind} {so} {story.name}" if described < 0.55 else kind if described < 0.85 else story.name
        place = f" {at(story.place)}" if rng.random() < 0.25 else ""
        about = f" about {named}{place}"
        if story.thing and rng.random() < 0.15:
            about += f" and {a(story.thing)}"
    elif not about and rng.random() < 0.4:
        about = f" that takes place {at(story.place)}"
    state.story = story
    asked = rng.choice(talk.ASK_STORY + (talk.MORE_ASK_STORY if state.wider else ()))
    return asked.format(about=about), story.text


def ask_another(state: Talk) -> Exchange:
    """One more story."""
    state.story = tell(state.rng, held_out=state.held_out, wider=state.wider)
    state.names += [state.story.name, state.story.friend]
    return state.rng.choice(talk.STORY_AGAIN), state.story.text


def ask_about_story(state: Talk) -> Exchange:
    """Who and where, in the story told last."""
    story, rng = state.story, state.rng
    if story is None:
        return ask_story(state)
    slots = {"n": story.name, "h": story.hero, "o": story.other}
    kind = rng.choice(("who", "friend", "where"))
    if kind == "who":
        return rng.choice(talk.STORY_WHO).format(**slots), f"The {story.hero} was called {story.name}."
    if kind == "friend":
        return rng.choice(talk.STORY_FRIEND).format(**slots), f"It was {story.friend}, the {story.other}."
    return rng.choice(talk.STORY_WHERE).format(**slots), f"{story.name} lived {at(story.place)}."


def look_back(state: Talk) -> list[Exchange]:
    """Two or three exchanges, of which the last takes up what was said in the first."""
    first, last = state.rng.choice(((introduce, ask_my_name), (tell_own, ask_own), (ask_story, ask_about_story)))
    exchanges = [first(state)]
    if last is not ask_about_story and state.rng.random() < 0.7:
        exchanges.append(state.rng.choice((small, ask_what, use, say))(state))
    exchanges.append(last(state))
    return [(state.typed(asked), answer) for asked, answer in exchanges]


_KINDS: tuple[tuple[Callable[[Talk], Exchange], float], ...] = (
    (greet, 3.0), (introduce, 16.0), (ask_my_name, 2.0), (tell_own, 6.0), (say, 6.0), (small, 10.0), (use, 7.0),
    (ask_what, 34.0), (unknown, 9.0), (ask_story, 20.0),
)  # fmt: skip
