"""A chat of several rounds: each request repeats the conversation, and only its new part is computed."""

from __future__ import annotations

from examples.vllm.client import Client, arguments, long_text

QUESTIONS = ("What is this about?", "What happens before a storm?", "And in spring?", "Sum it up, please.")


def main() -> None:
    options = arguments(__doc__)
    client = Client(options)
    messages = [{"role": "system", "content": long_text("Duties of the keeper", options.seed)}]
    for round_, question in enumerate(QUESTIONS, 1):
        messages.append({"role": "user", "content": f"{question} {long_text('Note', round_, sentences=20)}"})
        answer = client.chat(messages)
        messages.append({"role": "assistant", "content": answer.text})
        print(f"round {round_}: {answer}")


if __name__ == "__main__":
    main()
