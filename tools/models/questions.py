"""The prompts of a family, which end around the boundaries of its cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from tests.integration.model_families import (
    IMAGE_PAD,
    IMAGE_SIDE,
    IMAGE_TOKENS,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
)
from tests.integration.vllm_answers import Image, Question, Video, tokens
from tests.integration.vllm_driver import CHUNK
from tools.models.families import Family

STEP = 256  # tokens of a step of vLLM: longer prefills are chunked
LONGEST = 9 * CHUNK
IMAGE_LENGTH = IMAGE_TOKENS + 2  # tokens of an image or a video in a prompt


def lengths(family: Family) -> list[int]:
    """Lengths of prompts: exactly at a boundary of blocks, chunks, windows or steps, one before it and one after it."""
    boundaries = {family.block, 3 * family.block, CHUNK, 5 * CHUNK, STEP, LONGEST}
    if family.window:
        window = family.window
        boundaries |= {window, 2 * window, 5 * CHUNK + window}
        boundaries |= {window - window % family.block + family.block}  # the next end of a block
    around = {boundary + more for boundary in boundaries for more in (-1, 0, 1)}
    return sorted(length for length in around if not family.images or length > IMAGE_LENGTH + 2)


class Questions:
    """Makes the questions of a family.

    Args:
        adapters: Directories of its adapters.
    """

    def __init__(self, family: Family, adapters: tuple[str, ...] = ()) -> None:
        self._family = family
        self._adapters = itertools.cycle(adapters or ("",))
        self._images = itertools.count(1)

    def around_boundaries(self, name: str) -> list[Question]:
        """One question of each length; the first chunk of each one is its own."""
        return [self._question(f"{name} {length}", length) for length in lengths(self._family)]

    def in_sequence(self, name: str) -> list[Question]:
        """Questions with common prefixes, in an order in which vLLM's own prefix cache has hits.

        The last ones repeat an earlier one, continue one, diverge after the end of one, and are the prefix of one.
        """
        first = self._question(f"{name} common", 300 + IMAGE_LENGTH * self._family.images)
        common = first.prompt
        ends = [tokens(f"{name} end {index}", 200) for index in range(3)]
        more, other = tokens(f"{name} more", 250), tokens(f"{name} other", 60)
        prompts = [(*common, *end) for end in ends]
        prompts += [prompts[1], (*prompts[0], *more), (*prompts[0], *more[:150], *other), common]
        return [replace(first, prompt=prompt) for prompt in prompts]

    def mixed(self, name: str, count: int = 10) -> list[Question]:
        """Questions of many lengths with long answers, for few blocks. Some have a common prefix."""
        generator = Random(f"{self._family.title} {name}")
        common = tokens(f"{name} shared by some", 260)
        found = []
        for index in range(count):
            length = generator.randrange(2 * CHUNK, 500) + IMAGE_LENGTH * self._family.images
            question = self._question(f"{name} {index}", length)
            if index % 3 == 0:
                shared = common[: generator.randrange(CHUNK, 260)]
                question = replace(question, prompt=(*shared, *question.prompt))
            found.append(replace(question, max_tokens=48))
        return found

    def changed(self, name: str) -> Iterator[tuple[int, Question, Question]]:
        """Pairs of questions that differ in one token, with its distance from the end."""
        reach = self._family.reach
        question = self._question(f"{name} changed", reach + CHUNK + IMAGE_LENGTH * self._family.images)
        prompt = question.prompt
        for distance in (reach, reach * 2 // 3, reach // 3):
            place = len(prompt) - distance
            while prompt[place] in {VISION_START, IMAGE_PAD, VIDEO_PAD, VISION_END}:
                place -= 1
            other = 3 + (prompt[place] + 100) % 500
            yield (
                len(prompt) - place,
                question,
                replace(question, prompt=(*prompt[:place], other, *prompt[place + 1 :])),
            )

    def _question(self, seed: str, length: int) -> Question:
        """A question of this number of tokens, including those of its image or video. Every second one has a video."""
        adapter = next(self._adapters)
        if not self._family.images:
            return Question(tokens(seed, length), adapter=adapter)
        text = tokens(seed, length - IMAGE_LENGTH)
        before = len(text) // 2
        index = next(self._images)
        media: dict[str, Any] = {"images": (Image(index, IMAGE_SIDE),)}
        if index % 2:
            # Two frames become the tokens of one.
            media = {"videos": (Video(index, frames=4, width=IMAGE_SIDE, height=IMAGE_SIDE // 2),)}
        pad = VIDEO_PAD if index % 2 else IMAGE_PAD
        prompt = (*text[:before], VISION_START, pad, VISION_END, *text[before:])
        return Question(prompt, adapter=adapter, **media)
