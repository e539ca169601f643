"""What a chat template tells about a model's reasoning: how it is marked, and whether a prompt's end has opened it."""

from penstock.render.tools import Marks

KNOWN_MARKS = (Marks("<think>", "</think>"), Marks("[THINK]", "[/THINK]"))


def marks_of(template: str) -> Marks | None:
    """The marks that a template speaks of; None where it speaks of none."""
    return next((marks for marks in KNOWN_MARKS if marks.opening in template or marks.closing in template), None)


def is_open(prompt: str, marks: Marks | None) -> bool:
    """Whether the reply to `prompt` begins inside the reasoning."""
    return marks is not None and prompt.rstrip().endswith(marks.opening)


def closed(marks: Marks) -> str:
    """What closes reasoning that the prompt has opened, for a reply that is to begin without any."""
    return f"\n{marks.closing}\n\n"
