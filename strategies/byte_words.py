"""Numbers of bytes, written for people."""


def in_words(nbytes: float) -> str:
    """Returns bytes for people. Example: in_words(3 << 29) == "1.5 GiB"."""
    value, unit = nbytes, "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"
