"""Send `vllm serve` two questions about one long text: the second one reuses the KV of the text."""

from __future__ import annotations

from examples.vllm.client import Client, arguments, long_text


def main() -> None:
    options = arguments(__doc__)
    client = Client(options)
    manual = long_text("Manual of the harbour", options.seed)
    for question in ("When is the pump checked?", "Who paints the crane?"):
        answer = client.complete(f"{manual}\n\nQuestion: {question}\nAnswer:")
        print(f"{question:26} {answer}")


if __name__ == "__main__":
    main()
