"""Questions over shared documents: what is reused is the common beginning of two prompts, nothing behind it.

The first table has the documents in the order in which a search might return them, the second one in an order that is the
same for all questions. A document that stands behind another one than before is computed again: its KV depends on all
that stands before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from examples.vllm.asking import Asker, arguments, long_text

FOUND = (("tides", "ships"), ("tides", "birds"), ("ships", "tides"), ("birds", "tides"))
"""What was found for each question, the best first."""


def main() -> None:
    options = arguments(__doc__)
    asker = Asker(options)
    print("as they were found:")
    ask(asker, FOUND, options.seed)
    print("in one order for all:")
    ask(asker, [sorted(names, reverse=True) for names in FOUND], options.seed + 1_000_000)


def ask(asker: Asker, found: Sequence[Sequence[str]], seed: int) -> None:
    for number, names in enumerate(found):
        documents = "\n\n".join(long_text(f"About {name}", seed) for name in names)
        answer = asker.complete(f"{documents}\n\nQuestion {number}: what do they have in common?\nAnswer:")
        print(f"  {' + '.join(names):14} {answer}")


if __name__ == "__main__":
    main()
