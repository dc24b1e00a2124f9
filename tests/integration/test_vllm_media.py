"""Prompts with images and videos in a real vLLM: a Qwen2.5-VL whose answers depend on them.

Each answer about an image is compared with one that vLLM computes without loading or storing, and each answer about a
video with one of a vLLM without connector.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration import vision
from tests.integration.model_families import (
    IMAGE_PAD,
    IMAGE_SIDE,
    IMAGE_TOKENS,
    MERGE,
    PATCH,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    make_image_model,
)
from tests.integration.vllm_answers import Answer, Image, Question, Video, assert_same, difference, tokens
from tests.integration.vllm_driver import BLOCK, CHUNK, Engine, Engines, Reference, connector

pytestmark = pytest.mark.vllm

BEFORE, AFTER = tokens("before", CHUNK + 6), tokens("after", 110)
LENGTH = len(BEFORE) + len(AFTER) + IMAGE_TOKENS + 2
WHOLE = LENGTH - LENGTH % BLOCK
COUNTED = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
"""Options with which vLLM counts images instead of hashing them."""


def about(seed: int, uuid: str | None = None, processor: dict[str, Any] | None = None) -> Question:
    """A question about an image; questions differ only in the image."""
    prompt = (*BEFORE, VISION_START, IMAGE_PAD, VISION_END, *AFTER)
    return Question(prompt, images=(Image(seed, IMAGE_SIDE, uuid),), processor=processor)


def about_video(seed: int, **changes: Any) -> Question:
    """A question about a video of six frames, which become three times 48 tokens: as many as of an image."""
    size = {"frames": 6, "width": 8 * PATCH * MERGE, "height": 6 * PATCH * MERGE}
    prompt = (*BEFORE, VISION_START, VIDEO_PAD, VISION_END, *AFTER)
    return Question(prompt, videos=(Video(seed, **(size | changes)),))


def ask(engine: Engine, question: Question) -> Answer:
    answer = engine.ask(question)
    engine.settle()
    return answer


def computed(engine: Engine, question: Question) -> Answer:
    """The answer without the cache."""
    alone = Question(
        question.prompt,
        images=question.images,
        processor=question.processor,
        params={"skip_load": True, "skip_save": True},
    )
    answer = ask(engine, alone)
    assert answer.cached_tokens == 0
    return answer


@dataclass(frozen=True, slots=True)
class Models:
    """Two models that differ only in their image processors."""

    one: Path
    other: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    assert vision.is_installed(), f"torchvision is not installed, and not in {vision.PLACE}: make install"
    folder = tmp_path_factory.mktemp("images")
    return Models(
        make_image_model(folder / "a" / "model"), make_image_model(folder / "b" / "model", image_mean=0.2)
    )


def options(model: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": {"image": 1, "video": 1},
    }


@pytest.fixture(scope="module")
def engine(engines: Engines, models: Models) -> Iterator[Engine]:
    """An engine that hashes images, vLLM's default."""
    with engines.started(connector(), **options(models.one)) as engine:
        yield engine


@pytest.fixture(scope="module")
def counted(engines: Engines, models: Models, directory: Path) -> dict[str, Answer]:
    """Answers of an engine that counted images, stored in `directory`, and has ended."""
    settings = connector(disk=directory)
    with engines.started(settings, **COUNTED, **options(models.one)) as engine:
        answers = {
            "counted": ask(engine, about(1)),
            "counted and scaled": ask(engine, about(1, processor={"do_rescale": True})),
            "named": ask(engine, about(3, "cat")),
            "other": computed(engine, about(2)),
        }
        answers["again"] = ask(engine, about(1))
        engine.close()
    return answers


def test_the_answers_depend_on_the_image(engine: Engine) -> None:
    assert difference(computed(engine, about(1)), computed(engine, about(2))) == math.inf


def test_the_same_image_is_a_hit_and_another_one_shares_the_text_before_it(engine: Engine) -> None:
    cold, warm, other = (ask(engine, about(seed)) for seed in (1, 1, 2))

    assert cold.cached_tokens <= CHUNK  # an earlier test may have stored the text before the image
    assert (warm.cached_tokens, other.cached_tokens) == (WHOLE, CHUNK)
    assert_same(cold, computed(engine, about(1)))
    assert_same(warm, cold)
    assert_same(other, computed(engine, about(2)))


def test_counted_images_are_neither_stored_nor_loaded(counted: dict[str, Answer]) -> None:
    """Neither is an image whose hash has the form of a content hash, but is of its count and the request's options."""
    assert counted["counted"].cached_tokens == counted["counted and scaled"].cached_tokens == 0
    assert counted["again"].cached_tokens == 0
    logged = counted["counted"].log
    assert "requests with images, audio or video are not cached" in logged
    assert "stored" not in logged


def test_a_restarted_engine_that_counts_images_takes_none_for_another(
    engines: Engines, models: Models, directory: Path, counted: dict[str, Answer]
) -> None:
    settings = connector(disk=directory)
    with engines.started(settings, **COUNTED, **options(models.one)) as engine:
        other = ask(engine, about(2))
        scaled = ask(engine, about(2, processor={"do_rescale": True}))
        named = ask(engine, about(3, "cat"))

    assert_same(other, counted["other"])
    assert_same(scaled, counted["other"])
    assert difference(counted["counted"], counted["other"]) == math.inf
    assert (other.cached_tokens, scaled.cached_tokens) == (0, 0)
    assert named.tiers == {"disk": WHOLE}  # the client provides the identity
    assert_same(named, counted["named"])


def test_a_changed_image_processor_finds_nothing_of_the_one_before(
    engines: Engines, models: Models, directory: Path, counted: dict[str, Answer]
) -> None:
    with engines.started(connector(disk=directory), **COUNTED, **options(models.other)) as engine:
        answer = ask(engine, about(3, "cat"))
        again = ask(engine, about(3, "cat"))
        reference = computed(engine, about(3))

    assert answer.cached_tokens == 0
    assert again.cached_tokens == WHOLE
    assert_same(answer, reference)
    assert_same(again, reference)
    assert difference(answer, counted["named"]) > 0.1


@pytest.fixture(scope="module")
def plain(engines: Engines, models: Models) -> Iterator[Reference]:
    """Answers without connector."""
    with engines.started(**options(models.one)) as engine:
        yield Reference(engine)


def test_the_same_video_is_a_hit(engine: Engine, plain: Reference) -> None:
    cold, warm = (ask(engine, about_video(1)) for _ in range(2))

    assert cold.cached_tokens <= CHUNK  # an earlier test may have stored the text before the video
    assert warm.cached_tokens == WHOLE
    for answer in (cold, warm):
        assert_same(answer, plain(about_video(1)))


@pytest.mark.parametrize(
    "changes",
    [{"seed": 3}, {"fps": 1.0}, {"width": 6 * PATCH * MERGE, "height": 8 * PATCH * MERGE}],
    ids=["frames", "frame rate", "shape"],
)
def test_another_video_of_the_same_length_shares_the_text_before_it(
    engine: Engine, plain: Reference, changes: dict[str, Any]
) -> None:
    question, other = about_video(2), about_video(**({"seed": 2} | changes))
    ask(engine, question)

    answer = ask(engine, other)

    assert answer.cached_tokens == CHUNK
    assert_same(answer, plain(other))
    assert difference(plain(question), plain(other)) > 0.1
