"""A list of words that an option was given."""

from stepscope.core.errors import InputError


def words(text: str, option: str) -> list[str]:
    """A comma-separated list of words, each once."""
    found = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise InputError(f"{option} is empty: name at least one")
    return found
