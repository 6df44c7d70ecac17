"""Conversations, made up from `demo.talk`, `demo.facts`, `demo.questions` and the stories."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from demo import facts, questions, talk, words
from demo.names import is_held_out_pair, name
from demo.stories import Story, capital, tell
from demo.words import a, at

Exchange = tuple[str, str]  # what the user says, and the answer


@dataclasses.dataclass
class Talk:
    """What has been said so far.

    Attributes:
        rng: decides what comes next.
        held_out: whether names and combinations are those that training never sees.
        user: the user's name, once told.
        own: question and answer about what the user has told.
        story: the story told last.
    """

    rng: random.Random
    held_out: bool = False
    user: str = ""
    own: tuple[tuple[str, ...], str] | None = None
    story: Story | None = None

    def a_name(self) -> str:
        """Any name."""
        return name(self.rng, held_out=self.held_out)


def converse(rng: random.Random, *, held_out: bool = False) -> tuple[str, list[Exchange]]:
    """A system message, which may be "", and one to four exchanges."""
    system = rng.choice(talk.SYSTEM) if rng.random() < 0.25 else ""
    state = Talk(rng, held_out)
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
        exchanges.append((informal(rng, asked, state.user), answer))
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
    asked = state.rng.choice(talk.MY_NAME).format(n=state.user)
    if state.rng.random() < 0.35:
        asked = f"{state.rng.choice(talk.GREETINGS)}{state.rng.choice((',', '!', '.'))} {asked}"
    ask = state.rng.random()
    if ask < 0.12:
        return f"{asked} {state.rng.choice(talk.ASK_MY_NAME)}", f"Your name is {state.user}."
    if ask < 0.2:
        return f"{asked} {state.rng.choice(talk.SMALL['who'][0])}", f"Hello, {state.user}! {talk.SMALL['who'][1][0]}"
    return asked, state.rng.choice(talk.NICE_TO_MEET).format(n=state.user)


def ask_my_name(state: Talk) -> Exchange:
    """What the user was called, or that it was not said."""
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
    """What the user told about themselves."""
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
    asked, answers = state.rng.choice(list(talk.SMALL.values()))
    return state.rng.choice(asked), state.rng.choice(answers)


def use(state: Talk) -> Exchange:
    """How the server is used."""
    asked, answers, _ = state.rng.choice(questions.USE)
    return state.rng.choice(asked), state.rng.choice(answers)


def ask_what(state: Talk) -> Exchange:
    """A question about a topic; some pairs of topic and phrasing are held out."""
    rng = state.rng
    while True:
        key, topic = rng.choice(list(facts.TOPICS.items()))
        kinds: list[tuple[tuple[str, ...], tuple[str, ...]]] = [(questions.ASK_WHAT, topic.answers)] * 4
        kinds += [(questions.ASK_HOW, topic.how)] * 2 if topic.how else []
        kinds += [(questions.ASK_WHY, topic.why)] * 2 if topic.why else []
        phrasings, answers = rng.choice(kinds)
        phrasing = rng.choice(phrasings)
        if is_held_out_pair(key, phrasing) == state.held_out:
            return capital(phrasing.format(x=rng.choice(topic.names))), rng.choice(answers)


def unknown(state: Talk) -> Exchange:
    """A question that it cannot answer."""
    rng = state.rng
    slots = {"n": state.a_name(), "w": rng.choice(talk.WORLD), "v": rng.choice(talk.WORLD)}
    numbers = {"d": rng.randint(1, 99), "e": rng.randint(1, 99)}
    return rng.choice(talk.UNKNOWN).format(**slots, **numbers), rng.choice(talk.DO_NOT_KNOW)


def ask_story(state: Talk) -> Exchange:
    """A story, with some of what shall be in it."""
    rng = state.rng
    plot = thing = ""
    how = rng.random()
    if how < 0.14:
        theme = rng.choice(list(words.THEMES))
        about, plot = f" about {theme}", words.THEMES[theme]
    elif how < 0.26:
        thing = rng.choice(words.THINGS)
        about = f" about {a(rng.choice(('', '', rng.choice(words.COLOURS) + ' ')) + thing)}"
    else:
        about = ""
    story = tell(rng, held_out=state.held_out, plot=plot, thing=thing)
    if 0.26 <= how < 0.92:
        kind = a(rng.choice((story.hero, story.hero, f"{rng.choice(words.TEMPERS)} {story.hero}")))
        described, called = rng.random(), rng.choice(("named", "called"))
        named = f"{kind} {called} {story.name}" if described < 0.55 else kind if described < 0.85 else story.name
        place = f" {at(story.place)}" if rng.random() < 0.25 else ""
        about = f" about {named}{place}"
        if story.thing and rng.random() < 0.15:
            about += f" and {a(story.thing)}"
    elif not about and rng.random() < 0.4:
        about = f" that takes place {at(story.place)}"
    state.story = story
    return rng.choice(talk.ASK_STORY).format(about=about), story.text


def ask_another(state: Talk) -> Exchange:
    """One more story."""
    state.story = tell(state.rng, held_out=state.held_out)
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
    return [(informal(state.rng, asked, state.user), answer) for asked, answer in exchanges]


_KINDS: tuple[tuple[Callable[[Talk], Exchange], float], ...] = (
    (greet, 3.0), (introduce, 16.0), (ask_my_name, 2.0), (tell_own, 6.0), (say, 6.0), (small, 10.0), (use, 7.0),
    (ask_what, 34.0), (unknown, 9.0), (ask_story, 20.0),
)  # fmt: skip
