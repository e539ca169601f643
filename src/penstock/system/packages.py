"""How to install the packages of one of our extras, by their own names."""

from importlib import metadata


def install_command(*extras: str, wheel: str = "penstock-rl") -> str:
    """Returns a `pip install` line that works anywhere; one for a checkout if our own metadata is not installed."""
    from packaging.requirements import Requirement  # slow to import, for a line that few commands print

    try:
        declared = [Requirement(text) for text in metadata.requires(wheel) or ()]
    except metadata.PackageNotFoundError:
        declared = []
    wanted = [each for each in declared if each.marker and any(each.marker.evaluate({"extra": extra}) for extra in extras)]
    if not wanted:
        return f"pip install '.[{','.join(extras)}]' in the checkout"
    options = (f"[{','.join(sorted(each.extras))}]" if each.extras else "" for each in wanted)
    names = dict.fromkeys(f"'{each.name}{more}{each.specifier}'" for each, more in zip(wanted, options, strict=True))
    return f"pip install {' '.join(names)}"
