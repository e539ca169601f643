"""The key tables of `docs/claw-r1.md`, made from the facade's own. Run it to print them."""

from claw_r1.keys import ALIASES, COMBINED_KEYS, MAPPED_KEYS
from claw_r1.other_keys import FIXED_KEYS, IGNORED_KEYS


def key_tables() -> str:
    """Four tables in Markdown: what sets something, second spellings, what must keep its value, what has no effect."""
    sets = [(key, f"`{each.ours}`", each.note) for key, each in MAPPED_KEYS.items()]
    together = [
        (key, ", ".join(f"`{name}`" for name in ours.split(", ") if name), note) for key, (ours, note) in COMBINED_KEYS.items()
    ]
    only = [(key, ", ".join(f"`{_written(value)}`" for value in rule.values), rule.reason) for key, rule in FIXED_KEYS.items()]
    parts = [
        _table(("Key", "Sets here", ""), [*sets, *together]),
        _table(("Or written as", "The same as"), [(alias, f"`{key}`") for alias, key in ALIASES.items()]),
        _table(("Key", "Only", "Since"), only),
        _table(
            ("No effect", "Since"),
            [(", ".join(f"`{key}`" for key in keys), reason) for reason, keys in IGNORED_KEYS.items()],
            code=False,
        ),
    ]
    return "\n\n".join(parts)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]], *, code: bool = True) -> str:
    lines = [head, ("---",) * len(head), *((f"`{first}`" if code else first, *rest) for first, *rest in rows)]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)


def _written(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    print(key_tables())
