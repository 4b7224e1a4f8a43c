"""Templated chats that train the tiny target and ask it for the demo's data.

The chats are small exact tasks (copy, sort, count, look up, add, ...) over random words, names and numbers. So an
answer is right or wrong, no two are alike, and much of each can be predicted from its prompt, as in real use.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

Draft = tuple[str, str, str]
"""Prompt, reasoning, answer."""

WORDS = """
acorn anchor apple arrow attic badger bakery banana barrel basket beach bear bell bicycle blanket boat book bottle
bread breeze bridge broom bucket butter button cabin cactus camel camera candle canoe canvas carpet carrot castle cat
cave cedar chair cheese cherry chimney circus clay cliff clock cloud clover coat coffee compass copper coral corn
cotton cow crab crown cup curtain daisy deer desert diamond dog dolphin donkey door dragon drum duck eagle earth eel
egg elbow elephant elm engine envelope falcon farm feather fence fern fiddle field fig finger fire fish flag flute fog
forest fork fossil fountain fox frog frost garden garlic gate giraffe glacier glass glove goat gold goose grape grass
guitar hammer harbour harp hat hawk hazel hedge helmet heron hill honey horse hotel ice igloo ink insect iron island
ivory ivy jacket jar jelly jewel jigsaw juice jungle kettle key kite kitten koala ladder lake lamp lantern leaf lemon
letter lion lizard lobster lunch magnet mango map maple marble market meadow melon milk mint mirror monkey moon moss
mountain mouse museum needle nest net nickel night noodle notebook nut oak oasis oat ocean olive onion orange orchard
otter oven owl oyster paddle paint palace paper parrot peach pear pebble pencil pepper piano pickle pigeon pillow pine
pirate planet plate plum pocket pond poppy potato prism puzzle quail quarry queen quilt quiver rabbit radio rain raven
ribbon rice river robin rocket roof rope rose ruby sail salmon salt sand scarf school seed shadow shark sheep shell
ship shoe silk silver snail snow soap sparrow spider spoon spring squirrel stable star stone storm stove sugar sun
swan table tea temple tent thunder tiger tomato torch tower train trumpet tulip tunnel turtle umbrella unicorn valley
vase velvet village violin volcano wagon walnut walrus water whale wheat wheel willow window wolf wool yacht yard yarn
yogurt zebra zigzag zinc zoo
""".split()  # noqa: SIM905
NAMES = """
Ada Alan Amir Anna Ben Carla Cleo Dan Diego Dora Eli Emma Felix Fiona Gita Grace Hana Hugo Ida Igor Ines Ivan Jade
Jonas Kai Kira Lars Leo Lina Luca Maya Mei Milo Nadia Nina Noah Olga Omar Otto Paul Petra Quinn Rosa Rui Sami Sara
Tara Theo Tom Uma Vera Viktor Wanda Will Xenia Yara Yusuf Zara Zoe
""".split()  # noqa: SIM905
COLOURS = ["red", "blue", "green", "white", "black", "brown", "yellow", "purple", "pink", "grey", "golden"]
VERBS = ["found", "sold", "lost", "painted", "hid", "carried", "bought", "dropped", "cleaned", "borrowed"]
PLACES = ["near", "under", "behind", "beside", "above", "inside", "past", "below"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = {
    **{"January": 31, "February": 28, "March": 31, "April": 30, "May": 31, "June": 30, "July": 31, "August": 31},
    **{"September": 30, "October": 31, "November": 30, "December": 31},
}
STYLES = {"": ", ", " Use spaces.": " ", " Use dashes.": " - ", " One per line.": "\n", " Use slashes.": " / "}


@dataclass(frozen=True, kw_only=True)
class Chat:
    """One task: `prompt` as the user types it, and the one right `reasoning` and `answer`."""

    kind: str
    prompt: str
    reasoning: str
    answer: str


def _copy(rng: random.Random) -> Draft:
    words, style = rng.sample(WORDS, rng.randint(7, 16)), rng.choice(list(STYLES))
    ask = rng.choice(["Repeat these words", "Copy this list", "Write this again", "Say it back to me"])
    reasoning = f"{len(words)} words from {words[0]} to {words[-1]}."
    return f"{ask}: {', '.join(words)}.{style}", reasoning, STYLES[style].join(words)


def _reverse(rng: random.Random) -> Draft:
    words, style = rng.sample(WORDS, rng.randint(4, 8)), rng.choice(list(STYLES))
    ask = rng.choice(["Reverse the list", "Write it backwards", "Last to first, please", "Turn this order around"])
    return f"{ask}: {' '.join(words)}.{style}", _numbered(words), STYLES[style].join(reversed(words))


def _pick(rng: random.Random) -> Draft:
    words, style = rng.sample(WORDS, rng.randint(5, 9)), rng.choice(list(STYLES))
    places = rng.sample(range(1, len(words) + 1), rng.randint(2, 4))
    wanted = " ".join(map(str, places))
    ask = rng.choice([f"Give words {wanted} of", f"Which words stand at {wanted} in", f"Pick numbers {wanted} from"])
    return f"{ask}: {', '.join(words)}.{style}", _numbered(words), STYLES[style].join(words[i - 1] for i in places)


def _sort(rng: random.Random) -> Draft:
    # One word a letter: the order is decided by first letters alone.
    words = list({word[0]: word for word in rng.sample(WORDS, rng.randint(7, 11))}.values())
    rng.shuffle(words)
    ask = rng.choice(["Sort by alphabet", "From a to z", "Put in order", "Order these"])
    style, ordered = rng.choice(list(STYLES)), sorted(words)
    reasoning = f"{' '.join(w[0] for w in words)} becomes {' '.join(w[0] for w in ordered)}."
    return f"{ask}: {', '.join(words)}.{style}", reasoning, STYLES[style].join(ordered)


def _filter(rng: random.Random) -> Draft:
    letter = rng.choice("bcdefghlmoprstw")
    words = rng.sample([w for w in WORDS if w[0] == letter], rng.randint(2, 5))
    words += rng.sample([w for w in WORDS if w[0] != letter], rng.randint(3, 5))
    rng.shuffle(words)
    ask = rng.choice(["Which of these start with {}", "Keep the words with {} in front", "Find all that begin with {}"])
    style = rng.choice(list(STYLES))
    reasoning = ", ".join(f"{w} {'yes' if w[0] == letter else 'no'}" for w in words) + "."
    kept = STYLES[style].join(w for w in words if w[0] == letter)
    return f"{ask.format(letter)}: {', '.join(words)}.{style}", reasoning, kept


def _count(rng: random.Random) -> Draft:
    terms, step = rng.randint(5, 10), rng.choice([-10, -5, -3, -2, -1, 1, 2, 3, 4, 5, 10, 20])
    start = rng.randint(1, 400) + max(0, -step * terms)
    numbers = [str(start + step * i) for i in range(terms)]
    by = "" if step == 1 else f" by {abs(step)}"
    direction = rng.choice(["Count", "Go", "Step"]) + (" down" if step < 0 else "")
    style = rng.choice(list(STYLES))
    prompt = f"{direction} from {numbers[0]} to {numbers[-1]}{by}.{style}"
    return prompt, f"{'Take' if step < 0 else 'Add'} {abs(step)} each time.", STYLES[style].join(numbers)


def _date(rng: random.Random) -> Draft:
    weekday, month, ahead = rng.randrange(7), rng.choice(list(MONTHS)), rng.randint(1, 6)
    day = rng.randint(1, MONTHS[month])
    dates = []
    for offset in range(ahead + 1):
        dates.append(f"{DAYS[(weekday + offset) % 7]} {day} {month}")
        day += 1
        if day > MONTHS[month]:
            day, month = 1, list(MONTHS)[(list(MONTHS).index(month) + 1) % 12]
    when = "tomorrow" if ahead == 1 else f"in {ahead} days"
    name = rng.choice(NAMES)
    asks = [
        (f"Today is {dates[0]}. Which date is it {when}?", f"It is {dates[-1]}."),
        (f"It is {dates[0]} and {name} comes {when}. When is that?", f"{name} comes on {dates[-1]}."),
    ]
    prompt, answer = rng.choice(asks)
    return prompt, ", ".join(dates[1:]) + ".", answer


def _lookup(rng: random.Random) -> Draft:
    names = rng.sample(NAMES, rng.randint(3, 6))
    rows = {name: f"{rng.choice(COLOURS)} {rng.choice(WORDS)}, {rng.randint(2, 99)} coins" for name in names}
    asked = rng.sample(names, 2)
    ask = rng.choice(["What do {} and {} own?", "Tell me about {} and {}.", "Look up {} and {}."])
    table = "\n".join(f"{name}: {row}" for name, row in rows.items())
    things = [rows[name].split(",")[0] for name in asked]
    reasoning = "; ".join(f"{name}: {rows[name]}" for name in asked) + "."
    return f"{table}\n{ask.format(*asked)}", reasoning, f"{asked[0]} has the {things[0]}, {asked[1]} the {things[1]}."


def _add(rng: random.Random) -> Draft:
    a, b = rng.randint(10, 10 ** rng.randint(2, 4)), rng.randint(10, 10 ** rng.randint(2, 4))
    columns, carry = [], 0
    for i in range(max(len(str(a)), len(str(b)))):
        digits = [a // 10**i % 10, b // 10**i % 10] + [1] * carry
        columns.append(f"{'+'.join(map(str, digits))}={sum(digits)}")
        carry = sum(digits) // 10
    name, word = rng.choice(NAMES), rng.choice(WORDS)
    asks = [
        (f"What is {a} + {b}?", f"{a} + {b} = {a + b}"),
        (f"Add {b} to {a}.", f"The sum is {a + b}."),
        (f"{name} has {a} coins in a {word} and gets {b}. How many now?", f"{name} has {a + b} coins in the {word}."),
    ]
    prompt, answer = rng.choice(asks)
    return prompt, ", ".join(columns) + ".", answer


def _longest(rng: random.Random) -> Draft:
    words = rng.sample(WORDS, rng.randint(5, 8))
    longest = max(words, key=len)
    words = [word for word in words if len(word) < len(longest) or word == longest]
    ask = rng.choice(["Which word is longest", "Find the longest word", "Most letters"])
    reasoning = ", ".join(f"{word} {len(word)}" for word in words) + "."
    return f"{ask}: {' '.join(words)}?", reasoning, f"{longest}, with {len(longest)} letters"


def _spell(rng: random.Random) -> Draft:
    words, mark = rng.sample(WORDS, rng.randint(2, 4)), rng.choice("-+.")
    ask = rng.choice(["Spell {} with {}", "Write the letters of {} with {} between", "Break {} up by {}"])
    reasoning = ", ".join(f"{word} {len(word)}" for word in words) + "."
    return f"{ask.format(' '.join(words), mark)}.", reasoning, ", ".join(mark.join(word) for word in words)


def _replace(rng: random.Random) -> Draft:
    sentence = (
        f"{rng.choice(NAMES)} {rng.choice(VERBS)} a {rng.choice(COLOURS)} {{}} {rng.choice(PLACES)} the {{}}, and "
        f"{rng.choice(NAMES)} {rng.choice(VERBS)} my {rng.choice(COLOURS)} {{}}."
    )
    *before, new = rng.sample(WORDS, 4)
    old = rng.choice(before)
    after = [new if word == old else word for word in before]
    ask = rng.choice([f"Change {old} to {new}", f"Put {new} in place of {old}", f"Replace {old} by {new}"])
    return f"{ask}: {sentence.format(*before)}", f"{old} becomes {new}.", sentence.format(*after)


def _pair(rng: random.Random) -> Draft:
    count = rng.randint(3, 6)
    names, things = rng.sample(NAMES, count), rng.sample(WORDS, count)
    ask = rng.choice(["Give each person one thing", "Pair them up", "Who gets what"])
    prompt = f"{ask}. People: {', '.join(names)}. Things: {', '.join(things)}."
    answer = ", ".join(f"{name} {thing}" for name, thing in zip(names, things, strict=True))
    return prompt, f"{count} people, {names[0]} to {names[-1]}, {things[0]} to {things[-1]}.", answer


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i} {word}" for i, word in enumerate(words, 1)) + "."


KINDS = {
    "copy": _copy,
    "reverse": _reverse,
    "pick": _pick,
    "sort": _sort,
    "filter": _filter,
    "count": _count,
    "date": _date,
    "lookup": _lookup,
    "add": _add,
    "longest": _longest,
    "spell": _spell,
    "replace": _replace,
    "pair": _pair,
}


def is_held_out(prompt: str) -> bool:
    """True for one prompt in sixteen, by its text alone: no seed or count can move it into the training set."""
    return blake2b(prompt.encode(), digest_size=1).digest()[0] < 16


def chats(seed: int, count: int, *, held_out: bool = False) -> Iterator[Chat]:
    """Draw `count` chats of random kinds, all from the training prompts or all from the held-out ones."""
    rng = random.Random(seed)
    while count > 0:
        kind = rng.choice(list(KINDS))
        prompt, reasoning, answer = KINDS[kind](rng)
        if is_held_out(prompt) == held_out:
            yield Chat(kind=kind, prompt=prompt, reasoning=reasoning, answer=answer)
            count -= 1
