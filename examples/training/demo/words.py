"""The words of the stories. A place and a thing come with what stands before them."""

from __future__ import annotations

from demo.names import each

ANIMALS = [
    "fox",
    "rabbit",
    "bear",
    "owl",
    "mouse",
    "cat",
    "dog",
    "hedgehog",
    "frog",
    "duck",
    "otter",
    "squirrel",
    "goat",
    "horse",
    "turtle",
    "badger",
    "wolf",
    "robin",
    "beaver",
    "deer",
    "sheep",
    "crow",
    "snail",
    "bee",
    "penguin",
    "hare",
    "lion",
    "monkey",
]
PEOPLE = [
    "girl",
    "boy",
    "sailor",
    "baker",
    "gardener",
    "painter",
    "teacher",
    "robot",
    "dragon",
    "giant",
    "king",
    "queen",
    "wizard",
    "singer",
    "farmer",
    "keeper",
    "poet",
    "tailor",
    "fisher",
    "knight",
    "princess",
    "miller",
    "child",
    "captain",
]
HEROES = ANIMALS + PEOPLE
MORE_HEROES = [  # of the third part of the training
    *each("unicorn elephant tiger zebra spider chicken dinosaur shark whale pig cow kitten puppy parrot fish dolphin"),
    *each("pirate witch mermaid ghost monster vampire astronaut doctor prince fairy programmer clown troll student"),
]
PRONOUNS = {"girl": "she", "queen": "she", "princess": "she", "boy": "he", "king": "he", "prince": "he"}
TEMPERS = each("little old brave shy clever curious quiet small happy sleepy kind patient gentle young tiny lonely")
PLACES = {
    "forest": "in", "village": "in", "valley": "in", "garden": "in", "meadow": "in", "castle": "in", "city": "in",
    "cave": "in", "library": "in", "orchard": "in", "desert": "in", "tower": "in", "mill": "in", "harbour": "by",
    "river": "by", "lake": "by", "sea": "by", "bridge": "by", "pond": "by", "well": "by", "mountain": "on",
    "hill": "on",
    "island": "on", "beach": "on", "farm": "on",
}  # fmt: skip
MORE_PLACES = {
    "moon": "on", "jungle": "in", "school": "at", "ship": "on", "park": "in", "town": "in", "zoo": "in", "market": "at",
}  # fmt: skip
LOOKS = ["old", "quiet", "green", "wide", "small", "dark", "sunny", "far"]
THINGS = [
    "lantern",
    "key",
    "letter",
    "map",
    "bell",
    "kite",
    "boat",
    "book",
    "coin",
    "stone",
    "shell",
    "feather",
    "drum",
    "clock",
    "hat",
    "ring",
    "seed",
    "lamp",
    "mirror",
    "box",
    "ball",
    "flute",
    "blanket",
    "cup",
    "scarf",
    "basket",
    "ladder",
    "rope",
    "wheel",
    "candle",
]
COLOURS = ["red", "golden", "blue", "green", "silver", "white", "shiny", "round", "tiny", "wooden"]
FOODS = ["cake", "pie", "loaf", "apple", "pear", "soup", "cheese", "pancake", "honey", "bun"]
SKILLS = (
    ("swim", "swam across the water"), ("sing", "sang a whole song"), ("dance", "danced all evening"),
    ("read", "read a whole page"), ("paint", "painted the morning sky"), ("fish", "caught a big silver fish"),
    ("climb", "climbed to the very top"), ("whistle", "whistled a merry tune"), ("sail", "sailed around the bay"),
    ("cook", "cooked a fine warm soup"), ("count", "counted every star"), ("juggle", "juggled five apples"),
)  # fmt: skip
FEARS = ("the dark", "the thunder", "the deep water", "high places", "loud noises", "the cold wind")
HIDING = (
    "under a big leaf", "behind an old tree", "inside a hollow log", "under the bridge", "beside the path",
    "at the bottom of a basket", "between two stones", "behind the door",
)  # fmt: skip
LESSONS = {
    "lost": ("a friend can find what one alone cannot", "it is good to ask for help", "looking twice is worth it"),
    "found": ("it is good to give back what you find", "being honest brings friends", "a kind act comes back"),
    "storm": ("every storm comes to an end", "a storm is easier to bear together", "a warm house is best when shared"),
    "learn": ("one has to try again and again", "practice makes hard things easy", "nobody learns it in one day"),
    "astray": ("a small light can show the way", "nobody is lost who has a friend", "home is never far away"),
    "gift": ("the best gifts are made by hand", "giving is as good as getting", "a gift need not be big"),
    "fear": ("being brave means trying anyway", "fear grows small when it is shared", "courage can be learned"),
    "share": ("there is always enough to share", "food tastes better with a friend", "sharing makes two people happy"),
    "treasure": ("friends are the best treasure", "the way is worth more than the gold", "a good day is a treasure"),
    "build": ("many hands make light work", "big things begin small", "what we build together lasts"),
}
THEMES = {  # what people ask for, and the plot that it means
    "a lost thing": "lost", "honesty": "found", "a storm": "storm", "learning something new": "learn",
    "getting lost": "astray", "a birthday": "gift", "being brave": "fear", "sharing": "share", "a treasure": "treasure",
    "building something": "build", "the rain": "storm", "fear": "fear", "a gift": "gift", "friendship": "share",
    "practice": "learn",
}  # fmt: skip


def a(phrase: str) -> str:
    """With its indefinite article."""
    return ("an " if phrase[0] in "aeiou" and not phrase.startswith("uni") else "a ") + phrase


def at(place: str) -> str:
    """ "forest" -> "in the forest"."""
    return f"{(PLACES | MORE_PLACES)[place]} the {place}"
