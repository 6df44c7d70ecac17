"""A grammar of little stories: a hero with a name, a place, a friend, a plot, an end."""

from __future__ import annotations

import dataclasses
import random

from demo import words
from demo.names import HERS, KNOWN, is_held_out_pair, name
from demo.words import a, at


@dataclasses.dataclass(frozen=True)
class Story:
    """A story and what is true in it.

    Attributes:
        text: the sentences, in one paragraph.
        hero: what the hero is, such as "fox".
        name: the hero's name.
        place: where the hero lives.
        friend: the friend's name.
        other: what the friend is.
        thing: what was lost, found, given or built with; the plots without one have "".
        plot: a key of `PLOTS`.
    """

    text: str
    hero: str
    name: str
    place: str
    friend: str
    other: str
    thing: str
    plot: str


# One list a sentence; a sentence is one of its alternatives. {He}, {he}, {his}, {him}: the hero's pronouns; {H}: the
# hero's name, {F}: the friend's; {o}: what the friend is; {t}: the thing.
PLOTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "lost": (
        ("One morning {H} could not find {his} {c} {t}.", "One day {H} lost {his} {c} {t}.",
         "One evening {his} {c} {t} was gone."),
        ("{He} looked in every corner, but it was not there.", "{He} searched the whole day and found nothing.",
         "{He} sat down and began to cry."),
        ("Then {ao} named {F} came by and asked what was wrong.", "{F}, {ao}, saw this and wanted to help.",
         "Luckily {his} friend {F}, {ao}, came to help."),
        ("Together they looked again, and there was the {t}, {hid}.", "{F} found the {t} {hid}.",
         "At last they saw the {t} {hid}."),
    ),
    "found": (
        ("One day {H} found {act} {hid}.", "One morning {H} saw {act} {hid}.",
         "While {he} was walking, {H} found {act}."),
        ('"Whose {t} is this?" {he} asked.', "{H} wondered whose {t} it was.",
         "{He} wanted to keep it, but it was not {his}."),
        ("{He} asked everyone, until {ao} named {F} began to smile.", "Then {he} met {F}, {ao}, who looked very sad.",
         "At the next house lived {ao} called {F}."),
        ('"That is my {t}!" said {F}, and {H} gave it back.', '"I have missed my {t} for days," said {F}.',
         "{H} gave the {t} back, and {F} danced with joy."),
    ),
    "storm": (
        ("One night a great storm came.", "One day dark clouds came over the {p}.",
         "One evening it began to rain and did not stop."),
        ("The wind took the roof of the house where {H} slept.", "The water rose, and {H} had to leave {his} house.",
         "{H} was cold and wet and did not know where to go."),
        ('"Come in!" called {F}, {ao} who lived near.', "Then {he} saw a light: it was the house of {F}, {ao}.",
         "{ao_} named {F} opened the door and let {him} in."),
        ("They sat by the fire and told stories until the sun came out.",
         "They drank hot tea and waited for the morning.", "In the morning the sky was blue again."),
    ),
    "learn": (
        ("{H} wanted to learn to {s}.", "More than anything, {H} wished to {s}.",
        "All {his} friends could {s}, but {H} could not."),
        ("{He} tried once, and it went wrong.", "The first time {he} tried, everyone laughed.",
         "{He} tried and tried, but it was too hard."),
        ('"Try again, a little every day," said {F}, {ao}.', "Then {F}, {ao}, showed {him} how to begin.",
         '{F}, {ao}, said: "I will help you."'),
        ("So {H} practised every morning, and at last {he} {d}.", "After many days {H} {d}.",
         "One fine day {H} {d}, and everyone clapped."),
    ),
    "astray": (
        ("One evening {H} walked too far and lost {his} way.", "One day {H} took a wrong turn and got lost.",
         "One foggy day {H} could not find the way home."),
        ("It grew dark, and every path looked the same.", "{He} called, but nobody answered.",
         "The stars came out, and {he} was afraid."),
        ("Then a small light came nearer: it was {F}, {ao} with {act}.", "{F}, {ao}, heard {him} and came with {act}.",
         "At last {he} met {F}, {ao}, who carried {act}."),
        ('"Follow me," said {F}, and soon they were home.', "{F} took {his} hand and showed {him} the way.",
         "Side by side they walked home."),
    ),
    "gift": (
        ("It was the birthday of {F}, {ao}.", "Soon it would be the birthday of {F}, {ao}.",
         "{F}, {ao}, had a birthday, and {H} wanted to bring a gift."),
        ("{H} had no money, so {he} made {act}.", "For three days {H} worked on {act}.",
         "{H} thought for a long time, and then {he} made {act}."),
        ("It was not quite straight, and {H} was a little ashamed.", "{He} wrapped it in a big leaf.",
         "{He} hid it behind {his} back."),
        ('"This is the best {t} in the world!" said {F}.', "{F} loved the {t} and never let it go.",
         "When {F} saw the {t}, {f} laughed with joy."),
    ),
    "fear": (
        ("{H} was afraid of {fear}.", "There was one thing that {H} feared: {fear}.",
         "{H} never told anyone, but {he} was afraid of {fear}."),
        ("One day {F}, {ao}, called for help.", "One night {F}, {ao}, was in danger.",
         "Then {his} friend {F}, {ao}, needed {him}."),
        ("{H} shook, but {he} did not run away.", "{H} took a deep breath and went on.",
         '"I must be brave now," thought {H}.'),
        ("{He} reached {F} in time and saved {fm}.", "Soon {F} was safe.", "When it was over, {F} hugged {him}."),
    ),
    "share": (
        ("One day {H} had only {one_food} left.", "{H} had {one_food} for dinner and nothing else.",
         "One cold day {H} was given {one_food}."),
        ("Then {F}, {ao}, knocked at the door and was hungry.", "On the way {he} met {F}, {ao}, who had nothing.",
         "{ao_} named {F} looked at it with big eyes."),
        ("{H} thought for a moment and gave {fm} half.", '"Half of it is yours," said {H}.',
         "{H} broke it in two and gave {F} the bigger part."),
        ("The next day {F} came back with a full basket.", "They ate together and were full.",
         "They ate, they talked, and the evening was warm."),
    ),
    "treasure": (
        ("One day {H} found an old map.", "In an old book {H} found a map of the {q}.",
         "One windy morning an old map flew into the hands of {H}."),
        ("{H} and {his} friend {F}, {ao}, packed a bag and set out for the {q}.",
         "With {F}, {ao}, {he} walked for three days to the {q}.",
         "Together with {F}, {ao}, {he} went to find the treasure {atq}."),
        ("They dug a deep hole and found {act}.", "There stood a big box, and in it lay {act}.",
         "They looked everywhere and found only {act}."),
        ('"That is enough for us," said {F}.', "They laughed and took the {t} home.",
         "It was not gold, but they had seen the world."),
    ),
    "build": (
        ("{H} wanted to build a house {atq}.", "{H} had a plan: a boat big enough for two.",
         "One spring {H} began to build a bridge."),
        ("It was hard work for one alone.", "{He} carried wood from morning to night.", "The first one fell down."),
        ("{F}, {ao}, came with {act} and said: \"We can do it together.\"", "Then {F}, {ao}, brought {act} and helped.",
         "{F}, {ao}, had {act} that was just what they needed."),
        ("After a week it was done.", "When it was ready, everyone came to see it.",
         "At last it stood, and it was strong."),
    ),
}  # fmt: skip
WITH_THING = tuple(
    plot for plot, lines in PLOTS.items() if any("{t}" in text or "{act}" in text for text in sum(lines, ()))
)

OPENINGS = (
    "Once upon a time there was {ah} named {H} who lived {ap}.", "Once upon a time, {ap}, there lived {ah} named {H}.",
    "Once upon a time there lived {ah} called {H}. {H} lived {ap}.", "Once upon a time {ah} named {H} lived {ap}.",
    "Long ago there was {ah} named {H} who lived {ap}.", "There once was {ah} called {H} who lived {ap}.",
    "{Ap} lived {ah} named {H}.", "The {h} {H} lived {ap}.", "{H} was {ah} who lived {ap}.",
    "In a small house {ap} lived {ah} named {H}.", "Many years ago {ah} called {H} lived {ap}.",
)  # fmt: skip
HABITS = (
    "Every day {he} walked around the {p}.", "{He} liked to sit and look at the sky.",
    "{He} had a small house and a warm bed.",
    "Everyone there liked {him}.", "{He} sang a song every morning.", "{He} was always ready to help.",
)  # fmt: skip
ENDINGS = (
    "From that day on, {H} and {F} were best friends.", "And so {H} and {F} became friends.",
    "{H} learned that {l}.", "That night {H} slept well, for now {he} knew that {l}.",
    "{H} never forgot that {l}.", "Since then they have met every evening.", '"{L}," said {F}, and they both laughed.',
    "And they lived happily {ap}.",
)  # fmt: skip


def tell(
    rng: random.Random,
    *,
    held_out: bool = False,
    hero: str = "",
    called: str = "",
    place: str = "",
    thing: str = "",
    plot: str = "",
    wider: bool = False,
) -> Story:
    """Make a story up; what is given is kept.

    Args:
        rng: decides the rest.
        held_out: whether the names, and the pair of hero and place, are those that training never sees.
        hero: a word such as those of `words.HEROES`.
        called: the hero's name.
        place: a word of `words.PLACES`.
        thing: a word of `words.THINGS`.
        plot: a key of `PLOTS`.
        wider: whether there are more heroes and places, and pronouns go with known names.
    """
    heroes = words.HEROES + words.MORE_HEROES if wider else words.HEROES
    places = words.PLACES | words.MORE_PLACES if wider else words.PLACES
    plot = plot or rng.choice(WITH_THING if thing else tuple(PLOTS))
    if hero and hero not in heroes:
        place = place or rng.choice(list(places))  # a hero that does not exist meets every place
    else:
        hero, place = _pair(rng, hero, place, held_out, heroes, list(places))
    called = called or name(rng, held_out=held_out)
    friend = name(rng, held_out=held_out)
    other = rng.choice([word for word in heroes if word != hero])
    thing = thing or rng.choice(words.THINGS)
    he, he2 = _pronoun(rng, hero, called, wider), _pronoun(rng, other, friend, wider)
    kind = f"{rng.choice(words.TEMPERS)} {hero}" if rng.random() < 0.7 else hero
    kind2 = f"{rng.choice(words.TEMPERS)} {other}" if rng.random() < 0.35 else other
    where = at(place) if rng.random() < 0.7 else f"{places[place]} {a(rng.choice(words.LOOKS) + ' ' + place)}"
    far = rng.choice([word for word in places if word != place])
    skill, done = rng.choice(words.SKILLS)
    lesson = rng.choice(words.LESSONS[plot])
    slots = {
        "H": called, "F": friend, "h": hero, "ah": a(kind), "ao": a(kind2), "ao_": capital(a(kind2)), "o": other,
        "p": place,
        "ap": where, "Ap": capital(where), "q": far, "atq": at(far), "t": thing, "c": rng.choice(words.COLOURS),
        "act": a(f"{rng.choice(words.COLOURS)} {thing}"), "he": he, "He": he.capitalize(),
        "his": {"he": "his", "she": "her"}[he], "him": {"he": "him", "she": "her"}[he], "f": he2,
        "fm": {"he": "him", "she": "her"}[he2], "hid": rng.choice(words.HIDING), "s": skill, "d": done,
        "fear": rng.choice(words.FEARS), "one_food": f"one {rng.choice(words.FOODS)}", "l": lesson,
        "L": capital(lesson),
    }  # fmt: skip
    lines = [rng.choice(OPENINGS)]
    if rng.random() < 0.4:
        lines.append(rng.choice(HABITS))
    lines += [rng.choice(sentence) for sentence in PLOTS[plot]]
    lines.append(rng.choice(ENDINGS))
    has_thing = any("{t}" in line or "{act}" in line for line in lines)
    text = " ".join(line.format(**slots) for line in lines)
    return Story(text, hero, called, place, friend, other, thing if has_thing else "", plot)


def _pronoun(rng: random.Random, kind: str, called: str, wider: bool) -> str:
    if wider and called in KNOWN and kind not in words.PRONOUNS:
        return "she" if called in HERS else "he"
    return words.PRONOUNS.get(kind) or rng.choice(("he", "she"))


def _pair(
    rng: random.Random, hero: str, place: str, held_out: bool, heroes: list[str], places: list[str]
) -> tuple[str, str]:
    """A hero and a place that meet in training, or that do not."""
    for _ in range(1000):
        one, two = hero or rng.choice(heroes), place or rng.choice(places)
        if is_held_out_pair(one, two) == held_out:
            return one, two
    raise ValueError(f"hero={hero!r} and place={place!r} are no pair with held_out={held_out}; leave one of them out.")


def capital(text: str) -> str:
    """With a capital first letter; the rest as it was."""
    return text[0].upper() + text[1:]
