"""What the digests of an experiment are made of: a field that comes later must not change the key of a stored one."""

from collections.abc import Collection

import msgspec


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
