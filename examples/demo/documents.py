"""Long documents of random sentences, and questions about them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

KEEPERS = ("Mara", "Odd", "Ines", "Tomas", "Yrsa", "Pavel", "Noor", "Elin", "Jonas", "Sefa", "Katla", "Bram")
PLACES = (
    "north light",
    "salt pier",
    "old harbour",
    "west reef",
    "signal hill",
    "tide mill",
    "grey strand",
    "fish market",
)
BIRDS = (
    "terns",
    "gannets",
    "puffins",
    "curlews",
    "gulls",
    "plovers",
    "herons",
    "cormorants",
    "eiders",
    "petrels",
)
SHIPS = (
    "Halcyon",
    "Merganser",
    "Blue Anna",
    "Patience",
    "Stormglass",
    "Second Chance",
    "Little Auk",
    "Marigold",
)
WEATHER = (
    "fog",
    "rain",
    "hail",
    "a low sun",
    "still air",
    "a north wind",
    "thunder",
    "frost",
    "a warm breeze",
)
CARGO = ("timber", "barley", "glass", "rope", "herring", "lamp oil", "paper", "copper", "wool", "apples")
VERBS = ("counted", "sketched", "noted", "missed", "followed", "described")


@dataclass(frozen=True, slots=True)
class Document:
    """A text with questions about it.

    Attributes:
        questions: The first, which is measured, has two tokens: the time to compute a longer one would hide the
            time to load the document.
    """

    title: str
    text: str
    questions: tuple[str, ...]


def make_document(seed: int, *, sentences: int = 600) -> Document:
    """Return the log of a lighthouse keeper, about 14 tokens per sentence with the tokenizer of the demo."""
    choose = random.Random(seed)
    keeper, place = choose.choice(KEEPERS), choose.choice(PLACES)
    title = f"Log {choose.randrange(1000, 9999)} of {keeper}, keeper at the {place}"
    text = f"{title}.\n" + " ".join(_sentences(choose, sentences))
    questions = (
        " Summary:",
        f"\n\nQuestion: what did {keeper} write about the {choose.choice(BIRDS)}?\nAnswer:",
        f"\n\nQuestion: which ship brought {choose.choice(CARGO)}?\nAnswer:",
        f"\n\nQuestion: how was the weather at the {place} on day {choose.randrange(400)}?\nAnswer:",
    )
    return Document(title=title, text=text, questions=questions)


def training_texts(count: int = 40) -> Iterator[str]:
    """Yield texts to train the tokenizer, from seeds that no measured document uses."""
    for seed in range(count):
        document = make_document(1_000_000 + seed, sentences=300)
        yield "".join((document.text, *document.questions))


def _sentences(choose: random.Random, count: int) -> Iterator[str]:
    for day in range(count):
        keeper, place, number = choose.choice(KEEPERS), choose.choice(PLACES), choose.randrange(2, 900)
        yield choose.choice(
            (
                f"On day {day} {keeper} {choose.choice(VERBS)} {number} {choose.choice(BIRDS)} near the {place}.",
                f"The {choose.choice(SHIPS)} came in with {number} loads of {choose.choice(CARGO)} for {keeper}.",
                f"There was {choose.choice(WEATHER)} over the {place} until {keeper} rang the bell {number} times.",
                f"{keeper} paid {number} coins for {choose.choice(CARGO)} and asked about the {choose.choice(SHIPS)}.",
            )
        )
