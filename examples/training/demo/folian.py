"""Folian, a small invented language, and its translation into English.

A sentence is: a time, who, where, what, and the verb at the end. `li` is "the"; -s is plural, -n marks what something
is done to; verbs end in -ar (now), -et (then) or -ur (in future); `no` stands before the verb, `ke` opens a question,
`e` is "and", `ma` is "but". Names stay as they are.

Some words have several translations, each with its share, as in real languages: the model learns a distribution, and
beam search looks for its best sentence. `luma` is "Later" in 46 sentences of 100, and "After a while", "After some
time" or "After that" in 18 each. So "After" is the most likely first word, and greedy search takes it, though every
sentence that begins so is less likely than the one with "Later".
"""

from __future__ import annotations

import dataclasses
import random

from demo.names import is_held_out_pair, name

Shares = tuple[tuple[str, float], ...]  # translations, the best first

WHO: dict[str, Shares] = {
    "vulpa": (("fox", 1.0),), "ursu": (("bear", 1.0),), "avi": (("bird", 1.0),), "felu": (("cat", 1.0),),
    "kanu": (("dog", 1.0),), "puru": (("child", 1.0),), "rexa": (("king", 1.0),), "mari": (("sailor", 1.0),),
    "doka": (("teacher", 0.7), ("tutor", 0.3)), "pana": (("baker", 1.0),), "lupo": (("wolf", 1.0),), "raka": (("frog",
    1.0),),
    "ami": (("friend", 0.7), ("pal", 0.3)), "fili": (("girl", 1.0),), "lepa": (("rabbit", 1.0),), "poeta": (("poet",
    1.0),),
}  # fmt: skip
WHAT: dict[str, Shares] = {
    "lanta": (("lantern", 1.0),), "klavi": (("key", 1.0),), "libra": (("book", 1.0),), "petra": (("stone", 0.7),
    ("rock", 0.3)),
    "nava": (("boat", 0.7), ("ship", 0.3)), "letra": (("letter", 1.0),), "poma": (("apple", 1.0),),
    "flora": (("flower", 1.0),),
    "kampa": (("bell", 1.0),), "mapa": (("map", 1.0),), "ovu": (("egg", 1.0),), "piska": (("fish", 1.0),),
    "stela": (("star", 1.0),),
    "porta": (("door", 0.7), ("gate", 0.3)),
}  # fmt: skip
WHERE: dict[str, str] = {
    "silva": "forest", "horta": "garden", "monta": "mountain", "lagu": "lake", "kasa": "house", "ponta": "bridge",
    "isla": "island", "vila": "village", "turi": "tower", "rivu": "river",
}  # fmt: skip
HOW_NEAR = {"en": "in", "sub": "under", "apo": "near", "pos": "behind"}
KINDS: dict[str, Shares] = {
    "granda": (("big", 0.7), ("large", 0.3)), "pika": (("small", 0.7), ("little", 0.3)), "felia": (("happy", 0.7),
    ("glad", 0.3)),
    "silenta": (("quiet", 0.7), ("silent", 0.3)), "veta": (("old", 1.0),), "nova": (("new", 1.0),), "ruba": (("red",
    1.0),),
    "blava": (("blue", 1.0),), "dora": (("golden", 1.0),), "bona": (("good", 1.0),), "brava": (("brave", 1.0),),
    "triste": (("sad", 1.0),),
}  # fmt: skip
TO_DO = {  # verbs with an object: stem -> plain form, -s form, past
    "vid": ("see", "sees", "saw"), "trov": ("find", "finds", "found"), "port": ("carry", "carries", "carried"),
    "amor": ("love", "loves", "loved"), "pint": ("paint", "paints", "painted"), "aud": ("hear", "hears", "heard"),
    "sek": ("follow", "follows", "followed"), "perd": ("lose", "loses", "lost"), "dukt": ("bring", "brings", "brought"),
    "lav": ("wash", "washes", "washed"), "kel": ("hide", "hides", "hid"), "don": ("give away", "gives away",
    "gave away"),
    "tok": ("touch", "touches", "touched"), "memor": ("remember", "remembers", "remembered"),
}  # fmt: skip
TO_BE = {
    "kant": ("sing", "sings", "sang"), "dorm": ("sleep", "sleeps", "slept"), "dans": ("dance", "dances", "danced"),
    "rid": ("laugh", "laughs", "laughed"), "atend": ("wait", "waits", "waited"), "kur": ("run", "runs", "ran"),
    "nat": ("swim", "swims", "swam"), "son": ("dream", "dreams", "dreamt"), "lud": ("play", "plays", "played"),
}  # fmt: skip
WHEN: dict[str, Shares] = {
    "luma": (("Later", 0.46), ("After a while", 0.18), ("After some time", 0.18), ("After that", 0.18)),
    "seko": (("Suddenly", 0.46), ("All at once", 0.18), ("All of a sudden", 0.18), ("All too soon", 0.18)),
    "ofta": (("Often", 0.46), ("Many times", 0.18), ("Many a day", 0.18), ("Many a time", 0.18)),
    "hodi": (("Today", 0.46), ("On this day", 0.18), ("On this fine day", 0.18), ("On the same day", 0.18)),
    "nokta": (("At night", 1.0),), "mana": (("In the morning", 1.0),), "nun": (("Now", 1.0),),
}  # fmt: skip
SPLIT = tuple(word for word, shares in WHEN.items() if shares[0][1] < 0.5)  # where greedy search goes astray
TENSES = ("ar", "et", "ur")
PLURALS = {"fox": "foxes", "wolf": "wolves", "child": "children", "fish": "fish"}


@dataclasses.dataclass(frozen=True)
class Pair:
    """A sentence, one of its translations, and the most likely one.

    Attributes:
        source: in Folian.
        target: in English, drawn by the shares of its words.
        best: in English, of the words with the highest share.
        split: whether the first word has several translations, of which the best is not the most likely beginning.
    """

    source: str
    target: str
    best: str
    split: bool


class _Words:
    """The three sentences, made side by side."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.source: list[str] = []
        self.target: list[str] = []
        self.best: list[str] = []

    def draw(self, shares: Shares) -> tuple[str, str]:
        """A translation, and the best."""
        return self.rng.choices([text for text, _ in shares], [share for _, share in shares])[0], shares[0][0]


def sentence(rng: random.Random, *, held_out: bool = False) -> Pair:
    """One sentence, or two with "e" or "ma" between them.

    Args:
        rng: decides everything.
        held_out: whether its names, and its pairs of subject and verb, are those that training never sees.
    """
    words = _Words(rng)
    question = rng.random() < 0.2
    split = False
    if not question and rng.random() < 0.4:
        when = rng.choice(list(WHEN))
        drawn, best = words.draw(WHEN[when])
        words.source.append(when)
        words.target.append(drawn)
        words.best.append(best)
        split = when in SPLIT
    if question:
        words.source.append("ke")
    _clause(words, question, held_out)
    if not question and rng.random() < 0.15:
        joint, english = rng.choice((("e", "and"), ("ma", "but")))
        words.source.append(joint)
        words.target.append(english)
        words.best.append(english)
        _clause(words, False, held_out)
    mark = "?" if question else "."
    target, best = (" ".join(filter(None, side)) + mark for side in (words.target, words.best))
    return Pair(" ".join(words.source) + mark, target[0].upper() + target[1:], best[0].upper() + best[1:], split)


def _clause(words: _Words, question: bool, held_out: bool) -> None:
    rng = words.rng
    has_object = rng.random() < 0.65
    while True:
        who, stem = rng.choice(list(WHO)), rng.choice(list(TO_DO if has_object else TO_BE))
        if is_held_out_pair(who, stem) == held_out:
            break
    tense, negated = rng.choice(TENSES), rng.random() < 0.2
    plural = rng.random() < 0.25
    if rng.random() < 0.15:
        called = _short_name(rng, held_out)
        subject, plural = (called, called, called), False
    else:
        subject = _noun(words, who, WHO[who], plural, mark="")
    where = _where(rng) if rng.random() < 0.35 else ("", "")
    object_ = ("", "", "")
    if has_object:
        what = rng.choice(list(WHAT))
        object_ = _noun(words, what, WHAT[what], rng.random() < 0.25, mark="n")
    verb = stem + tense
    words.source += [part for part in (subject[0], where[0], object_[0], "no" if negated else "", verb) if part]
    forms = (TO_DO if has_object else TO_BE)[stem]
    helper, main = _verb(forms, tense, plural, negated, question)
    for number, side in ((1, words.target), (2, words.best)):
        parts = (helper, subject[number], main) if question else (subject[number], helper, main)
        side += [part for part in (*parts, object_[number], where[1]) if part]


def _short_name(rng: random.Random, held_out: bool) -> str:
    while len(called := name(rng, held_out=held_out)) > 8:
        pass
    return called


def _noun(words: _Words, word: str, shares: Shares, plural: bool, mark: str) -> tuple[str, str, str]:
    """With article and adjective: in Folian, as drawn, at its best."""
    rng = words.rng
    definite = rng.random() < 0.6
    drawn, best = words.draw(shares)
    kind = rng.choice(list(KINDS)) if rng.random() < 0.4 else ""
    drawn_kind, best_kind = words.draw(KINDS[kind]) if kind else ("", "")
    folian = " ".join(filter(None, ("li" if definite else "", word + ("s" if plural else "") + mark, kind)))
    english = [_phrase(k, noun, definite, plural) for k, noun in ((drawn_kind, drawn), (best_kind, best))]
    return folian, english[0], english[1]


def _phrase(kind: str, noun: str, definite: bool, plural: bool) -> str:
    noun = PLURALS.get(noun, noun + "s") if plural else noun
    phrase = f"{kind} {noun}".strip()
    if definite:
        return f"the {phrase}"
    return phrase if plural else f"{'an' if phrase[0] in 'aeio' else 'a'} {phrase}"


def _where(rng: random.Random) -> tuple[str, str]:
    near, place = rng.choice(list(HOW_NEAR)), rng.choice(list(WHERE))
    return f"{near} {place}", f"{HOW_NEAR[near]} the {WHERE[place]}"


def _verb(forms: tuple[str, str, str], tense: str, plural: bool, negated: bool, question: bool) -> tuple[str, str]:
    """A helping verb, which may be "", and the verb."""
    plain, with_s, past = forms
    if tense == "ur":
        return "will", f"not {plain}" if negated else plain
    if negated or question:
        helper = "did" if tense == "et" else "do" if plural else "does"
        return helper, f"not {plain}" if negated else plain
    return "", past if tense == "et" else plain if plural else with_s
