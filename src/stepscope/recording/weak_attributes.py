"""Attributes that do not keep a user's model or optimizer alive: the loop alone decides how long they live."""

import weakref
from collections.abc import Iterable
from typing import Any


class LoopGone(Exception):
    """Raised where the model or the optimizer of the loop is no more."""


class _Weakly:
    """An attribute of a class, whose objects are held weakly. To read it when its object is dead raises LoopGone, or
    gives None with `or_none`. In a dataclass, None is then its default."""

    def __init__(self, *, or_none: bool = False) -> None:
        self._or_none = or_none

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, holder: object | None, owner: type) -> Any:
        if holder is None:  # As a dataclass asks, for the default.
            if self._or_none:
                return None
            raise AttributeError(self._name)
        reference = vars(holder)[self._name]
        if reference is None:
            return None
        thing = reference()
        if thing is None and not self._or_none:
            raise LoopGone("the loop's model or optimizer is no more")
        return thing

    def __set__(self, holder: object, value: Any) -> None:
        vars(holder)[self._name] = weakref.ref(value) if value is not None else None


class _WeaklyEach:
    """An attribute of a class, whose objects hold several things weakly: read, it is the list of those alive."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, holder: object | None, owner: type) -> Any:
        if holder is None:
            raise AttributeError(self._name)
        return [thing for thing in (reference() for reference in vars(holder)[self._name]) if thing is not None]

    def __set__(self, holder: object, things: Iterable[Any]) -> None:
        vars(holder)[self._name] = [weakref.ref(thing) for thing in things]


# Their types are those of the things that are held.
weakly: Any = _Weakly
weakly_each: Any = _WeaklyEach
