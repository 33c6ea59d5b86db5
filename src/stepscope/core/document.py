"""JSON documents that stepscope writes and reads again: one codec, which checks them and names where they came from."""

from collections.abc import Collection
from typing import TypeVar

import msgspec

from stepscope.core.errors import InputError, one_line

T = TypeVar("T", bound=msgspec.Struct)


def json_document(value: object) -> str:
    """A value as one JSON document, indented for people."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n"


def decode_document(
    data: bytes, what: type[T], source: str, *, holds: str, newest: int | None = None, again: str = "with --json"
) -> T:
    """The value in a document. Raises InputError that names the source: it is empty, it does not hold what it should
    (`holds` says what), or its `version` is above the newest that this stepscope reads. `again`: how it is written.
    """
    if not data:
        raise InputError(
            f"{source} is empty: the command that was writing it ended before it was done; write it again {again}"
        )
    try:
        found = msgspec.json.decode(data, type=what)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InputError) as error:
        raise InputError(f"{source} holds no {holds}: {one_line(error)}") from error
    version = getattr(found, "version", 1)
    if version < 1:
        raise InputError(f"{source} is of version {version}, which does not exist: it holds no {holds}")
    if newest is not None and version > newest:
        raise InputError(f"{source} is of version {version}: this stepscope reads up to {newest}")
    return found


# What the digests of an experiment are made of: a field that comes later must not change the key of a stored one.


def identity_of(record: msgspec.Struct, first_fields: Collection[str]) -> dict[str, object]:
    """The fields of a record by name, records inside it left as they are.

    first_fields: those that stood when the first results were stored. They always count. A field that came later
    counts where it differs from its default.
    """
    return {
        field.name: value
        for field in msgspec.structs.fields(record)
        if (value := getattr(record, field.name)) != field.default or field.name in first_fields
    }
