"""Questions about shared documents: only the common prefix of two prompts is reused.

The first table has the documents in the order in which a search might return them, the second one in the same order for
all questions. A document after a different document is computed again, because its KV depends on everything before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from examples.vllm.client import Client, arguments, long_text

FOUND = (("tides", "ships"), ("tides", "birds"), ("ships", "tides"), ("birds", "tides"))
"""Passages found for each question, best first."""


def main() -> None:
    options = arguments(__doc__)
    client = Client(options)
    print("in search order:")
    ask(client, FOUND, options.seed)
    print("in a fixed order:")
    ask(client, [sorted(names, reverse=True) for names in FOUND], options.seed + 1_000_000)


def ask(client: Client, found: Sequence[Sequence[str]], seed: int) -> None:
    for number, names in enumerate(found):
        documents = "\n\n".join(long_text(f"About {name}", seed) for name in names)
        answer = client.complete(f"{documents}\n\nQuestion {number}: what do they have in common?\nAnswer:")
        print(f"  {' + '.join(names):14} {answer}")


if __name__ == "__main__":
    main()
