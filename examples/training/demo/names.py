"""Names that nobody has heard of, and what of the corpus is held out.

A name is made of syllables, so that there are far more of them than a model could learn by heart: it has to copy. One
name in eight, and one combination of two things in ten, never occurs in training; the checksum of its letters decides,
so that the same ones are held out in every run.
"""

from __future__ import annotations

import random
import zlib


def each(text: str, separator: str | None = None) -> tuple[str, ...]:
    """The words of a text, or its parts: a long list is easier to read so."""
    return tuple(text.split(separator))


ONSETS = each(
    "b c d f g h j k l m n p r s t v w y z br ch cl cr dr fl fr gl gr kl kr ph pl pr qu sh sk sl sn st str th "
    "tr tw vl zh zr x"
)
VOWELS = each("a a a e e e i i o o u y ae ai au ea ei ia ie io oa oo ou ua")
CODAS = each("- - - - - - - b d f g k l l m n n r r s t x z ck ld lf ll lk mp nd ng nk nt rd rk rn sh ss st th tz")
KNOWN = each(
    "Ada Alan Alice Amir Anna Ben Carla Chen Clara Cora Daniel David Diego Elena Ella Emma Erik Eva Felix "
    "Finn Grace Hana Henry Hugo Ida Igor Ines Iris Ivan Jack James Jana Jonas Julia Kai Karim Lars Laura Leo "
    "Lena Lina Lucy Luis Mara Maria Marco Mark Marta Mary Max Mei Mia Mila Milo Mina Nadia Nina Noah Nora "
    "Olga Oscar Otto Paul Paula Peter Petra Pia Priya Ravi Rita Robin Rosa Ruth Sam Sara Simon Sofia Sven "
    "Tara Theo Tim Tom Uma Vera Victor Yara Yuki Zoe"
)


HERS = frozenset(
    each(
        "Ada Alice Anna Carla Clara Cora Elena Ella Emma Eva Grace Hana Ida Ines Iris Jana Julia Laura Lena Lina Lucy "
        "Mara Maria Marta Mary Mei Mia Mila Mina Nadia Nina Nora Olga Paula Petra Pia Priya Rita Rosa Ruth Sara Sofia "
        "Tara Uma Vera Yara Yuki Zoe"
    )
)
MARKED = "áàâäãåçéèêëíìîïñóòôöõøúùûüýžščćřőűąęłńśźżğışßæœ"
SCRIPTS = (
    "абвгдежзиклмнопрстуфхцчшяю",
    "αβγδεζηθικλμνξοπρστυφχψω",
    "李王张陈林小明红雷华山川田中村子美",
    "あいうえおかきくけこさしすせそ",
)


def is_held_out(text: str, share: int = 8) -> bool:
    """Whether a name (or any text, whatever its capitals) is one of the `share`-th part that training never sees."""
    return zlib.crc32(text.lower().encode()) % share == 0


def is_held_out_pair(first: str, second: str) -> bool:
    """Whether two things never meet in training, though each of them occurs."""
    return is_held_out(f"{first}|{second}", 10)


def name(rng: random.Random, *, held_out: bool = False) -> str:
    """A name such as Zorblax, of one to four syllables; known ones only in training."""
    while True:
        kind = rng.random()
        if kind < 0.25 and not held_out:
            made = rng.choice(KNOWN)
        elif kind < 0.33:
            made = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 7))).capitalize()
        else:
            made = "".join(syllable(rng) for _ in range(rng.choice((1, 2, 2, 2, 2, 3, 3, 4)))).capitalize()
        if 2 <= len(made) <= 14 and is_held_out(made) == held_out:
            return made


def any_name(rng: random.Random, *, held_out: bool = False) -> str:
    """A name as people have them: most as `name` makes them, one in six with marks, digits or in two parts."""
    if rng.random() >= 0.17:
        return name(rng, held_out=held_out)
    while True:
        one = name(rng, held_out=held_out)
        kind = rng.random()
        if kind < 0.5:
            where = rng.randrange(len(one))
            made = one[:where] + rng.choice(MARKED) + one[where + 1 :]
            made = made[0].upper() + made[1:]
        elif kind < 0.6:
            letters = rng.choice(SCRIPTS)
            made = "".join(rng.choice(letters) for _ in range(rng.randint(2, 4)))
        elif kind < 0.8:
            made = one + rng.choice("- -") + name(rng, held_out=held_out)
        elif kind < 0.87:
            made = rng.choice(("O'", "D'", "Mc", "Mr. ", "Dr. ")) + one
        elif kind < 0.94:
            number = rng.randint(1, 99)
            made = f"{one}{number}" if rng.random() < 0.5 else f"{one[0]}{number % 10}{one[-1].upper()}{number // 10}"
        else:
            made = one.upper()[: rng.randint(1, 8)]
        if len(made) <= 20 and is_held_out(made) == held_out:
            return made


def syllable(rng: random.Random) -> str:
    """Such as "zor", "bla" or "xi"."""
    onset = "" if rng.random() < 0.12 else rng.choice(ONSETS)
    return onset + rng.choice(VOWELS) + rng.choice(CODAS).strip("-")
