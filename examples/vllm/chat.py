"""A chat of several rounds: each request repeats all that was said, and only what is new is computed."""

from __future__ import annotations

from examples.vllm.asking import Asker, arguments, long_text

QUESTIONS = ("What is this about?", "What happens before a storm?", "And in spring?", "Sum it up, please.")


def main() -> None:
    options = arguments(__doc__)
    asker = Asker(options)
    messages = [{"role": "system", "content": long_text("Duties of the keeper", options.seed)}]
    for round_, question in enumerate(QUESTIONS, 1):
        messages.append({"role": "user", "content": f"{question} {long_text('Note', round_, sentences=20)}"})
        answer = asker.chat(messages)
        messages.append({"role": "assistant", "content": answer.text})
        print(f"round {round_}: {answer}")


if __name__ == "__main__":
    main()
