"""Ask `vllm serve` two questions about one long text: the second finds the text's KV where the first one left it."""

from __future__ import annotations

from examples.vllm.asking import Asker, arguments, long_text


def main() -> None:
    options = arguments(__doc__)
    asker = Asker(options)
    manual = long_text("Manual of the harbour", options.seed)
    for question in ("When is the pump checked?", "Who paints the crane?"):
        answer = asker.complete(f"{manual}\n\nQuestion: {question}\nAnswer:")
        print(f"{question:26} {answer}")


if __name__ == "__main__":
    main()
