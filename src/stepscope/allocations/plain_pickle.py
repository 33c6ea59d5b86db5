"""Reads a pickle that holds plain data, and refuses every other before anything of it runs.

A pickle is a program. The few of its instructions that reach out of it (GLOBAL, STACK_GLOBAL, INST, EXT, persistent
ids) all ask the unpickler to find a name; here that is refused, with the name. Without a callable from outside, the
instructions that call (REDUCE, OBJ, NEWOBJ, BUILD) find only numbers, texts and containers to call, and fail.

What is left is work without end: 434 bytes of tuples that hold each other twice, as a key, have the unpickler hash for
years, and nothing in this process could stop it. So a process of its own reads the file, within limits of time and
memory, and hands a snapshot's events on as columns. What fits into no columns is read here again, as it is.
"""

import contextlib
import gzip
import io
import os
import pickle
import re
import signal
import subprocess
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, BinaryIO, NoReturn, cast

from stepscope.core.environment import bounded_memory, memory_held, without_collector
from stepscope.core.errors import EXIT_DONE, EXIT_WRONG_INPUT, InputError, one_line
from stepscope.core.files import check_regular
from stepscope.core.units import GIB, MIB, format_bytes

LARGEST_BYTES = 16 * GIB
"""The most bytes that are read of one pickle, unpacked: some thirty million events with deep stacks."""
_GZIP = b"\x1f\x8b"
_GZIP_MOST = 150
_GZIP_LEAST = 16 * MIB
"""The most bytes that a packed byte may unpack to, beyond small files: snapshots reach some 45, a bomb 1032."""
_ROOM_BYTES = 256 * MIB
_ROOM_PER_BYTE = 16
"""The most memory that reading may take, as a base and a multiple of the bytes read so far: plain data in Python takes
up to ten times its pickle, empty lists and texts of one byte seventy times."""
_LEAST_SECONDS, _BYTES_PER_SECOND = 5, 2 * MIB
"""Processor time that reading may take: a least, and a second for so many bytes. Some 50 MiB take a second."""
_BUFFER_BYTES = 1 << 20
_LONGEST_NAME = 100
_DEVICES = re.compile(rb"(?<=\x8c\x0ddevice_traces\x94\]\x94)\(?(?:\]\x94){1,64}")
"""The lists of events where PyTorch's pickles begin them, from protocol 4 on: those up to the first that has events."""
_ENOUGH_BYTES = 256
"""More than such lists and what is before them take."""
_BATCH = 1000
_SHORT = 8
"""Frames of a stack that is not worth emptying."""
_BELOW_2_TO_62 = bytes(range(0x40))

_FAULTS = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, KeyError, IndexError, OverflowError,
    RecursionError, SystemError, zlib.error,
)  # fmt: skip
"""What the standard library's unpickler raises for instructions that make no sense, as its documentation warns."""


class _Refused(Exception):
    """Raised where a pickle asks for something outside itself."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise _Refused(f"{module_name}.{global_name}")

    def persistent_load(self, pid: object, /) -> NoReturn:
        raise _Refused(f"the persistent object {pid!r}" if isinstance(pid, str) else "a persistent object")


@cache
def _numpy() -> Any:
    """NumPy, which takes a while to import: small snapshots need none."""
    import numpy  # noqa: PLC0415

    return numpy


class Odd(Exception):
    """Raised where events are not as PyTorch writes them, so that columns cannot hold them."""


class _Places(dict[Any, int]):
    """The place of each distinct value, in the order of asking. A type that is none of these is Odd."""

    def __init__(self, *types: type, cut: range = range(0)) -> None:
        super().__init__()
        self._types, self._cut = types, cut

    def __missing__(self, value: Any) -> int:
        if type(value) not in self._types and not (type(value) is int and value in self._cut):
            raise Odd
        return self.setdefault(value, len(self))


_NO_FRAMES: tuple[Any, int] = [], 0


class StackPlaces:
    """Distinct stacks, each a list of frames. PyTorch writes a frame once and refers to it, so that a stack is known by
    the identity of its frames."""

    def __init__(self) -> None:
        self.stacks: list[Any] = [()]
        self._place_of: dict[tuple[int, ...], int] = {(): 0}
        self._last_of: dict[int, tuple[list[Any], int]] = {}
        """By its innermost frame, the stack that was seen last: to compare with that one is thrice as fast."""
        self._stand_ins: list[list[int]] = [[]]
        self.cut = range(0)
        """Numbers of events that were cut out of the pickle: one in place of a list is a place below 0."""

    def places(self, lists: list[Any], *, empties: bool) -> list[int]:
        """The place of each stack. `empties`: whether long lists of frames give way to a stand-in, which tells the same
        where the list comes again. What is no list has a place of its own."""
        if not {*map(type, lists)} <= {list, tuple}:
            return [self._of_any(frames, empties) for frames in lists]
        places: list[int] = []
        before, place, last_of = None, 0, self._last_of
        for frames in lists:
            if frames is not before:  # the two events of a free share theirs
                before = frames
                last = last_of.get(id(frames[0])) if frames else _NO_FRAMES
                place = last[1] if last and (last[0] == frames or not frames) else self._place(frames)
                if empties and len(frames) > _SHORT:
                    frames[:] = self._stand_ins[place]
            places.append(place)
        return places

    def _of_any(self, frames: Any, empties: bool) -> int:
        if isinstance(frames, list | tuple):
            return self.places([cast("list[Any]", frames)], empties=empties)[0]
        if type(frames) is int and frames in self.cut:
            return -1 - frames
        if empties:
            raise Odd
        self.stacks.append(frames)
        self._stand_ins.append([])
        return len(self.stacks) - 1

    def _place(self, frames: list[Any] | tuple[Any, ...]) -> int:
        """The place of a stack that has frames."""
        key, new = tuple(map(id, frames)), len(self.stacks)
        place = self._place_of.setdefault(key, new)
        if place == new:
            stand_in = [-(1 << 40) - place]  # its number is an object of its own, and no frame
            self.stacks.append([*frames])
            self._stand_ins.append(stand_in)
            self._last_of[id(stand_in[0])] = stand_in, place
        self._last_of[key[0]] = self.stacks[place], place
        return place

    def put_back(self, frames: Any) -> None:
        """Fill a list that may have been emptied, for it can also belong to a block."""
        if type(frames) is not list:
            return
        emptied = cast("list[Any]", frames)
        if len(emptied) == 1 and type(emptied[0]) is int:
            emptied[:] = self.stacks[self._last_of.get(id(emptied[0]), _NO_FRAMES)[1]] or emptied


class Columns:
    """Events of one device by column: numbers as they are; texts, pools and stacks as places among those that differ.

    To an unpickler it is the list that it appends dicts to.
    """

    WORDS, TEXTS = ("addr", "size", "stream", "time_us"), ("action", "user_metadata")
    __slots__ = ("device_free", "numbers", "places", "pools", "stacks", "texts", "words")

    def __init__(self, stacks: StackPlaces) -> None:
        self.words: dict[str, array[int]] = {name: array("q") for name in self.WORDS}
        self.places: dict[str, array[int]] = {name: array("i") for name in (*self.TEXTS, "pool_id", "frames")}
        self.texts = {name: _Places(str, cut=stacks.cut) for name in self.TEXTS}
        self.pools = _Places(tuple, cut=stacks.cut)
        self.pools[None] = 0
        self.device_free: dict[int, int] = {}
        """What the driver had left, by the events that say so, from the first batch with one of the kind `oom` on."""
        self.stacks = stacks
        self.numbers = array("q")
        """For each event the number that stood for it, where it was cut out of the pickle, else -1."""

    def __len__(self) -> int:
        return len(self.words["addr"])

    def __setstate__(self, state: object) -> NoReturn:
        raise Odd

    def append(self, event: Any) -> None:
        self.extend([event])

    def extend(self, events: list[Any]) -> None:
        """Keep the figures of dicts, and empty them. Raises Odd, or what Python does, for others."""
        try:
            self.numbers.extend(array("q", events))
            events = []
        except TypeError:  # not all are numbers of events that were cut out of the pickle
            self.numbers.extend(array("q", [event if type(event) is int else -1 for event in events]))
            events = [event for event in events if type(event) is not int]
        self.take(events, itemgetter, empties=True)
        for event in events:
            event.clear()

    def take(self, events: list[Any], getter: Callable[[str], Callable[[Any], Any]], *, empties: bool = False) -> None:
        """Keep the figures of events, whose fields such getters read."""

        def values(name: str, default: object) -> list[Any]:
            try:
                return list(map(getter(name), events))
            except KeyError:  # versions differ in what they write
                return [event.get(name, default) for event in events]

        before = len(self)
        for name, column in self.words.items():
            column.extend(array("q", values(name, 0)))
        for name, distinct in self.texts.items():
            texts = values(name, None if name == "action" else "")
            self.places[name].extend(array("i", list(map(distinct.__getitem__, texts))))
        pools = values("pool_id", None)
        places = list(map(self.pools.__getitem__, pools)) if any(pools) else [0] * len(pools)
        self.places["pool_id"].extend(array("i", places))
        self.places["frames"].extend(array("i", self.stacks.places(values("frames", ()), empties=empties)))
        if "oom" in self.texts["action"]:
            told = {at: free for at, free in enumerate(values("device_free", 0), start=before) if free}
            if {*map(type, told.values())} - {int}:
                raise Odd
            self.device_free.update(told)

    def filled(self, values: dict[str, Any], objects: list[Any], cutter: "_Cutter") -> Any:
        """Add events that were cut; values are numbers or places among objects. Returns how often each is here."""
        np = _numpy()
        numbers = np.frombuffer(self.numbers, dtype=np.int64)
        is_cut = numbers != -1
        cut, odd = np.divmod(numbers[is_cut] - cutter.first, _SLOTS)
        if len(self) != len(numbers) - len(cut) or odd.any() or (cut < 0).any() or (cut >= cutter.count).any():
            raise Odd
        for name, column in self.words.items():
            whole = np.empty(len(numbers), dtype=np.int64)
            whole[~is_cut], whole[is_cut] = np.frombuffer(column, dtype=np.int64), values[name][cut]
            self.words[name] = array("q", whole.tobytes())
        known: dict[str, Any] = {**self.texts, "pool_id": self.pools}
        for name in (*known, "frames"):
            if name in known:
                fresh = _Places(*((str,) if name in self.texts else (tuple, type(None))))
                of_own = [fresh[cutter.object_of(value, objects)] for value in known[name]]
                self.texts.update({name: fresh} if name in self.texts else {})
                self.pools = self.pools if name in self.texts else fresh
                own = np.array(of_own, dtype=np.int32)[np.frombuffer(self.places[name], dtype=np.int32)]
                place = fresh.__getitem__
            else:
                own = np.array(self.places[name], dtype=np.int32)
                left = np.flatnonzero(own < 0)
                own[left] = [self.stack_place(cutter.object_of(-1 - at, objects)) for at in own[left].tolist()]
                place = self.stack_place
            codes, place_of = values[name][cut], np.zeros(len(objects), dtype=np.int32)
            place_of[codes] = 1
            few = np.flatnonzero(place_of)
            place_of[few] = [place(objects[code]) for code in few.tolist()]
            whole = np.empty(len(numbers), dtype=np.int32)
            whole[~is_cut], whole[is_cut] = own, place_of[codes]
            self.places[name] = array("i", whole.tobytes())
        rest, told = np.flatnonzero(~is_cut).tolist(), values["device_free"][cut]
        self.device_free = {rest[at]: free for at, free in self.device_free.items()}
        self.device_free.update(zip(np.flatnonzero(is_cut)[told != 0].tolist(), told[told != 0].tolist(), strict=True))
        return np.bincount(cut, minlength=cutter.count)

    def stack_place(self, frames: Any) -> int:
        """The place of a stack that comes once more. Raises Odd for what is none."""
        if type(frames) not in (list, tuple) or any(type(frame) is int for frame in frames[1:]):
            raise Odd
        return self.stacks.places([frames], empties=False)[0]

    def check(self) -> None:
        """Raise Odd where a figure is negative or so large that only a full check tells whether it may be."""
        unsigned = [self.words[name].tobytes()[7::8] for name in ("addr", "size", "time_us")]
        fits = all(not highest.translate(None, _BELOW_2_TO_62) for highest in unsigned)
        pools = [pool for pool in self.pools if pool is not None]
        fits &= all(len(pool) == 2 and {*map(type, pool)} == {int} and array("q", pool) for pool in pools)
        if not fits or any(not 0 <= free < 1 << 62 for free in self.device_free.values()):
            raise Odd

    def distinct(self) -> dict[str, Any]:
        """All but the columns, as plain data."""
        texts = {name: [*values] for name, values in self.texts.items()}
        return {"texts": texts, "pools": [*self.pools], "device_free": self.device_free, "events": len(self)}

    @property
    def arrays(self) -> "list[array[int]]":
        return [*self.words.values(), *self.places.values()]

    @classmethod
    def read(cls, distinct: dict[str, Any], stacks: StackPlaces, stream: IO[bytes]) -> "Columns":
        """What `distinct` said, and the columns from a stream."""
        columns = cls(stacks)
        for name, values in distinct["texts"].items():
            columns.texts[name].update({value: i for i, value in enumerate(values)})
        columns.pools.update({pool: i for i, pool in enumerate(distinct["pools"])})
        columns.device_free = distinct["device_free"]
        for column in columns.arrays:
            column.frombytes(stream.read(distinct["events"] * column.itemsize))
        return columns


_EVENT = b"}\x94("
_INLINE = re.compile(rb"\]\x94(?:\((?:h.|j.{4})+e|(?:h.|j.{4})a)?|\x8c.+\x94", re.DOTALL)
"""A list of objects of the memo, by their places there, or a text: what an event may put into the memo."""
_REFERENCES = re.compile(rb"h(.)|j(.{4})", re.DOTALL)
_LENGTHS = {b"K": 2, b"M": 3, b"J": 5, b"h": 2, b"j": 5}
"""Bytes of the instructions that push a number, or an object of the memo."""
_LONG, _TEXT, _MEMOIZE, _LIST = 0x8A, 0x8C, 0x94, int.from_bytes(b"]\x94", "little")
_FORMS, _LEAST_FIELDS, _SLOTS = 4, 5, 8
"""Forms of events that are told apart; the fewest fields of one, more than other dicts that begin with a text have; and
the most that an event puts into the memo."""
_CUT_FROM_BYTES = 4 * MIB
"""Below that, to import NumPy takes as long."""


class _Form:
    """The keys of a dict, in their order and as they are written (by places in the memo), and the values of many."""

    def __init__(self, keys: list[bytes]) -> None:
        self.keys, self.key_places = keys, [int.from_bytes(key[1:], "little") for key in keys]
        self.numbers: list[Any] = []
        self.fields: list[list[tuple[Any, Any]]] = [[] for _ in keys]
        """By field, arrays of values and of whether each is an object: by its place in the memo, or -1 less the number
        of what the event itself has in full."""

    @staticmethod
    def keys_of(text: bytes, at: int, end: int) -> list[bytes] | None:
        """The keys of the event there; None where it is none that can be cut."""
        keys = list[bytes]()
        at += len(_EVENT)
        while at < end:
            length = _LENGTHS.get(text[at : at + 1], 0) if text[at] in b"hj" else 0
            keys.append(text[at : at + length])
            at += length
            if not length or (len(keys) == 1 and text[at] not in b"hj\x8c"):
                return None
            more = {_LONG: 2, _TEXT: 3}.get(text[at], 0)
            length = text[at + 1] + more if more else _LENGTHS.get(text[at : at + 1], 0)
            at += length or (end - at if text[at] == ord("]") else end)
        return keys if at == end and len(keys) >= _LEAST_FIELDS else None


class _Numbered(dict[bytes, int]):
    """A number for each text of what an event puts into the memo, in the order of asking; -1 for what is none."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[bytes] = []

    def __missing__(self, text: bytes) -> int:
        self[text] = number = len(self.texts) if _INLINE.fullmatch(text) else -1
        if number >= 0:
            self.texts.append(text)
        return number

    def of(self, text: bytes, starts: Any, lengths: Any) -> list[int]:
        """The numbers of these pieces of a text."""
        pieces = map(slice, starts.tolist(), (starts + lengths).tolist())
        return list(map(self.__getitem__, map(text.__getitem__, pieces)))

    def references(self) -> list[list[int]]:
        """The places in the memo of the objects of each that is a list; of others none."""
        lists = (_REFERENCES.findall(text[2:]) if text[:1] == b"]" else [] for text in self.texts)
        return [[int.from_bytes(short or long, "little") for short, long in references] for references in lists]


class _Cutter:
    """Cuts regular events out of a pickle, which the unpickler would take most of its time for, and decodes them many
    at a time with NumPy. Numbers stand in the pickle for each, and in the memo for what it put there.

    An event is regular where it has the form of one before it: the same keys in the same order, each with a number, a
    short text, an object of the memo, or at last a list of such objects. Where one ends is guessed, and proven by
    following its instructions up to there.
    """

    def __init__(self) -> None:
        self.first = (int.from_bytes(os.urandom(3), "little") + 1) * _SLOTS
        """The number that stands for the first event: one that no pickle knows."""
        self.count, self.numbers = 0, range(0)
        """Events that were cut, and the numbers that stand for what they put into the memo."""
        self.forms: list[_Form] = []
        self.inline, self.most = _Numbered(), 1
        """What events have in full, and the most that one put into the memo."""
        self.places: Any = None
        """By place in the memo, the place among those objects of it that the events refer to."""

    def cut(self, text: bytes) -> tuple[bytes, bytes]:
        """The text without the regular events, up to where another may begin; and the rest, which more must follow."""
        np = _numpy()
        bytes_of = np.frombuffer(text, dtype=np.uint8)
        put = np.flatnonzero(bytes_of[1:-1] == _MEMOIZE)
        starts = put[(bytes_of[put] == _EVENT[0]) & (bytes_of[put + 2] == _EVENT[2])]
        if len(starts) < 2:
            return text[: -len(_EVENT)], text[-len(_EVENT) :]
        last = int(starts[-1])
        starts, follow = starts[:-1], starts[1:]
        # The next event follows at once, or after the end of a batch of PyTorch's pickler, `e(`.
        ends = np.where((bytes_of[follow - 1] == ord("(")) & (bytes_of[follow - 2] == ord("e")), follow - 3, follow - 1)
        left = np.flatnonzero(bytes_of[ends] == ord("u"))
        padded = text + bytes(512)  # what begins at the end is followed until it does not fit
        words = np.ndarray(len(padded) - 8, dtype="<u8", buffer=padded, strides=(1,))
        memos = np.zeros(len(starts), dtype=np.int8)
        """How often each put something into the memo, for those that are cut."""
        kept = list[tuple[_Form, Any, Any]]()
        for number in range(_FORMS):
            if not len(left) or (number == len(self.forms) and not self._learn(text, starts[left], ends[left])):
                break
            form = self.forms[number]
            fits, memos_of, values = self._decoded(text, words, form, starts[left], ends[left])
            memos[left[fits]] = memos_of
            kept.append((form, left[fits], values))
            left = np.delete(left, fits)
        numbers = np.cumsum(memos > 0) + self.count - 1
        for form, which, values in kept:
            form.numbers.append(numbers[which].astype(np.int32))
            for field, value in zip(form.fields, values, strict=True):
                field.append(value)
        return self._without(text[:last], starts, ends, memos), text[last:]

    def _learn(self, text: bytes, starts: Any, ends: Any) -> bool:
        """Whether one of the first events tells another form."""
        for start, end in zip(starts[:_BATCH].tolist(), ends[:_BATCH].tolist(), strict=True):
            keys = _Form.keys_of(text, start, end)
            if keys is not None and all(keys != form.keys for form in self.forms):
                self.forms.append(_Form(keys))
                return True
        return False

    def _decoded(self, text: bytes, words: Any, form: _Form, starts: Any, ends: Any) -> tuple[Any, Any, list[Any]]:
        """Which of these events have the form, what each put into the memo, and their values by field."""
        np = _numpy()
        at, which = starts + len(_EVENT), np.arange(len(starts))
        values, memos = list[tuple[Any, Any]](), np.full(len(starts), 1, dtype=np.int8)
        for place, key in enumerate(form.keys):
            fits = words[at] & np.uint64((1 << 8 * len(key)) - 1) == int.from_bytes(key, "little")
            at = at + len(key)
            word, value, refers, length = _pushed(words, at)
            few = np.flatnonzero(fits & (word & np.uint64(0xFF) == _TEXT))
            length[few] = (word[few] >> np.uint64(8) & np.uint64(0xFF)).astype(np.int64) + 3
            if place == len(form.keys) - 1:
                lists = np.flatnonzero(fits & (word & np.uint64(0xFFFF) == _LIST))
                length[lists] = ends[which[lists]] - at[lists]
                few = np.sort(np.concatenate([few, lists])) if len(few) else lists
            changes = _changes(words, at[few], length[few])
            numbers = np.array(self.inline.of(text, at[few[changes]], length[few[changes]]), dtype=np.int64)
            value[few] = -1 - np.repeat(numbers, np.diff(np.append(changes, len(few))))
            refers[few] = True
            fits[few] &= value[few] < 0
            memos[which[few]] += 1
            at = at + length
            fits &= length > 0
            if place == len(form.keys) - 1:
                fits &= (at == ends[which]) & (memos[which] <= _SLOTS)
            values.append((value, refers))
            if not fits.all():
                values = [(one[fits], two[fits]) for one, two in values]
                at, which = at[fits], which[fits]
        narrow = [(v.astype(np.int32) if v.max(initial=0) >> 31 == 0 else v, refers) for v, refers in values]
        return which, memos[which], narrow

    def _without(self, text: bytes, starts: Any, ends: Any, memos: Any) -> bytes:
        """The text with a number in place of each event that is cut: put into the memo, and, but for the first, off the
        stack, as often as the event did."""
        np = _numpy()
        which = np.flatnonzero(memos)
        if not len(which):
            return text
        instead = np.empty((len(which), int(memos.max())), dtype=[("push", "u1"), ("number", "<i4"), ("keep", "<u2")])
        instead["push"], instead["keep"] = ord("J"), int.from_bytes(b"\x940", "little")
        first = (np.arange(len(which), dtype=np.int32) + self.count) * _SLOTS + self.first
        instead["number"] = first[:, None] + np.arange(instead.shape[1], dtype=np.int32)
        places = np.delete(np.arange(7 * instead.shape[1]), 6)  # the first stays on the stack
        kept = places < 7 * memos[which][:, None]
        flat = instead.view(np.uint8)[:, places][kept].tobytes()
        self.most, self.count = max(self.most, instead.shape[1]), self.count + len(which)
        self.numbers = range(self.first, self.first + self.count * _SLOTS)
        begins, stops, until = starts[which], ends[which] + 1, np.cumsum(memos[which].astype(np.int64) * 7 - 1)
        breaks = np.flatnonzero(begins[1:] != stops[:-1])
        bounds = [0, *until[breaks].tolist(), len(flat)]
        gaps = [(0, int(begins[0])), *zip(stops[breaks].tolist(), begins[breaks + 1].tolist(), strict=True)]
        parts = list[bytes]()
        for (gap, gap_end), first, end in zip(gaps, bounds[:-1], bounds[1:], strict=True):
            parts += [text[gap:gap_end], flat[first:end]]
        return b"".join((*parts, text[int(stops[-1]) :]))

    def ending(self, text: bytes) -> bytes:
        """The end of the pickle, which then also gives the objects of the memo that the events refer to."""
        np = _numpy()
        if not self.count or text[-1:] != b".":
            return text
        told = [np.array([place for form in self.forms for place in form.key_places])]
        told += [np.array(stack, dtype=np.int64) for stack in self.inline.references()]
        for form in self.forms:
            told += [value[refers & (value >= 0)] for field in form.fields for value, refers in field if refers.any()]
        most = max(int(each.max(initial=0)) for each in told)
        if most > LARGEST_BYTES >> 4:
            raise Odd
        asked = np.zeros(most + 1, dtype=bool)
        for each in told:
            asked[each] = True
        references = np.flatnonzero(asked)
        self.places = np.cumsum(asked, dtype=np.int32) - 1
        gets = np.full((len(references), 5), ord("j"), dtype=np.uint8)
        gets[:, 1:] = references.astype("<u4")[:, None].view(np.uint8)
        return text[:-1] + b"(" + gets.tobytes() + b"t\x86."

    def values(self, memo: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Objects, `memo` of `ending` first, and by field what each event has: a number, or an object's place there."""
        np = _numpy()
        objects = [*memo]
        for text, references in zip(self.inline.texts, self.inline.references(), strict=True):
            frames = [memo[self.places[reference]] for reference in references]
            objects.append(frames if text[:1] == b"]" else text[2:-1].decode("utf-8", "surrogatepass"))
        objects += [None, "", ()]
        values = {name: np.zeros(self.count, dtype=np.int64) for name in (*Columns.WORDS, "device_free")}
        for default, name in enumerate(("action", "pool_id", "user_metadata", "frames")):
            values[name] = np.full(self.count, len(objects) - 3 + max(0, default - 1), dtype=np.int32)
        self.slots = np.full((self.count, self.most), -1, dtype=np.int32)
        for form in self.forms:
            names = [memo[self.places[place]] for place in form.key_places]
            if len({*names}) < len(names) or {*map(type, names)} != {str} or "action" not in names:
                raise Odd
            numbers = np.concatenate(form.numbers)
            slot = np.ones(len(numbers), dtype=np.int8)
            for name, field in zip(names, form.fields, strict=True):
                value, refers = (np.concatenate(parts) for parts in zip(*field, strict=True))
                field.clear()
                if refers.any():
                    inline = np.flatnonzero(refers & (value < 0))
                    in_memo = np.flatnonzero(refers & (value >= 0))
                    value[in_memo], value[inline] = self.places[value[in_memo]], len(memo) - 1 - value[inline]
                    self.slots[numbers[inline], slot[inline]] = value[inline]
                    slot[inline] += 1
                if name in values and (refers.any() if values[name].itemsize == 8 else not refers.all()):
                    raise Odd
                if name in values:
                    values[name][numbers] = value
        numbers = [each if type(each) is int and each in self.numbers else self.first - _SLOTS for each in memo]
        event, slot = np.divmod(np.array([*numbers, self.first - _SLOTS]) - self.first, _SLOTS)
        stands_for = np.where(event < 0, np.arange(len(event)), self.slots[event, np.minimum(slot, self.most - 1)])
        for name in ("action", "user_metadata", "pool_id", "frames"):
            value = values[name]
            values[name] = np.where(value < len(memo), stands_for[np.minimum(value, len(memo))], value)
        if any((value < 0).any() for value in values.values()):
            raise Odd
        return objects, values

    def object_of(self, value: Any, objects: list[Any]) -> Any:
        """The value, or the object that it stands for."""
        if type(value) is not int or value not in self.numbers:
            return value
        event, slot = divmod(value - self.first, _SLOTS)
        return objects[self.slots[event, min(slot, self.most - 1)]]


def _changes(words: Any, at: Any, length: Any) -> Any:
    """Where in a row of pieces of a text one differs from that before it, the first included."""
    np = _numpy()
    same = length[1:] == length[:-1]
    for k in range(0, int(length.max(initial=0)), 8):
        alike = np.flatnonzero(same & (length[1:] > k))
        if not len(alike):
            break
        beyond = np.maximum(8 - (length[alike] - k), 0).astype(np.uint64) << np.uint64(3)
        differ = (words[at[alike] + k] ^ words[at[alike + 1] + k]) << beyond
        same[alike[differ != 0]] = False
    return np.flatnonzero(np.append(True, ~same)[: len(at)])


@cache
def _instructions() -> tuple[Any, Any]:
    """By instruction its bytes, and which of the seven after the first hold what it pushes."""
    np = _numpy()
    lengths, masks = np.zeros(256, dtype=np.int64), np.zeros(256, dtype=np.uint64)
    for code, length in _LENGTHS.items():
        lengths[code[0]], masks[code[0]] = length, (1 << 8 * (length - 1)) - 1
    return lengths, masks


def _pushed(words: Any, at: Any) -> tuple[Any, Any, Any, Any]:
    """The eight bytes at these places; what their instructions push: numbers, or places in the memo; which are the
    latter; and how long each instruction is, 0 for others."""
    np = _numpy()
    word = words[at]
    code = word.astype(np.uint8)
    known, masks = _instructions()
    lengths = known[code]
    value = (word >> np.uint64(8) & masks[code]).astype(np.int64)
    long = np.flatnonzero(code == _LONG)
    if len(long):
        size = word[long] >> np.uint64(8) & np.uint64(0xFF)
        bits = np.minimum(size, 7) << np.uint64(3)
        number = words[at[long] + 2] & (np.uint64(1) << bits) - np.uint64(1)
        value[long] = number.astype(np.int64)
        is_plain = (size > 0) & (size < 8) & (number >> np.maximum(bits, 1) - np.uint64(1) == 0)
        lengths[long] = np.where(is_plain, 2 + size.astype(np.int64), 0)
    lengths[(code == ord("J")) & (value >> 31 > 0)] = 0
    return word, value, (code == ord("h")) | (code == ord("j")), lengths


class _ColumnsUnpickler(_PlainUnpickler):
    """Where a secret word stands for a list, it makes Columns; whatever else a pickle asks for is refused as ever."""

    def __init__(self, stream: BinaryIO) -> None:
        self._word, self._stacks, self._cutter = os.urandom(16).hex(), StackPlaces(), _Cutter()
        self._stacks.cut = range(self._cutter.first, self._cutter.first + (1 << 30))
        self._is_unframed = True
        planted = io.BufferedReader(_Chunks(self._planted(self._unframed(stream))), _BUFFER_BYTES)
        super().__init__(planted)

    def persistent_load(self, pid: object, /) -> Any:
        return Columns(self._stacks) if type(pid) is str and pid == self._word else super().persistent_load(pid)

    def _unframed(self, stream: BinaryIO) -> Iterator[bytes]:
        """The pickle without the instructions that tell how many bytes come, as long as one follows the other."""
        yield stream.read(2)
        while (head := stream.read(9))[:1] == b"\x95" and len(head) == 9:
            left = int.from_bytes(head[1:], "little")
            while left and (chunk := stream.read(min(left, _BUFFER_BYTES))):
                left -= len(chunk)
                yield chunk
        self._is_unframed = not head
        yield head
        yield from iter(lambda: stream.read(_BUFFER_BYTES), b"")

    def _planted(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """The pickle with the word in place of the instructions that make the lists of events."""
        held = b""
        for chunk in chunks:
            held += chunk
            found = _DEVICES.search(held)
            if found and len(held) - found.start() >= _ENOUGH_BYTES:
                instruction = b"\x8c" + bytes([len(self._word)]) + self._word.encode() + b"Q"
                yield held[: found.start()] + found[0].replace(b"]", instruction)
                yield from self._cut(held[found.end() :], chunks)
                return
            at = max(0, len(held) - _ENOUGH_BYTES) if not found else 0
            yield held[:at]
            held = held[at:]
        yield held

    def _cut(self, held: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """The pickle from the events on, without the regular ones."""
        parts, size = [held], len(held)
        for chunk in chunks:
            parts.append(chunk)
            size += len(chunk)
            if size >= _CUT_FROM_BYTES:
                text = b"".join(parts)
                done, rest = self._cutter.cut(text) if self._is_unframed else (text, b"")
                yield done
                parts, size = [rest], len(rest)
        done, rest = (
            self._cutter.cut(b"".join(parts)) if self._cutter.count and self._is_unframed else (b"", b"".join(parts))
        )
        yield done + self._cutter.ending(rest)

    def content(self) -> dict[str, Any]:
        """What a snapshot holds, with Columns for all its events. Raises Odd where it is none."""
        content, memo = self.load(), list[Any]()
        if self._cutter.count:
            if type(content) is not tuple or self._cutter.places is None:
                raise Odd
            content, memo = cast("tuple[Any, Any]", content)
        fields = cast("dict[str, Any]", content) if type(content) is dict else {}
        traces = fields.get("device_traces")
        if type(traces) is not list:
            raise Odd
        traces = cast("list[Any]", traces)
        for i, trace in enumerate(traces):
            if type(trace) is not Columns:
                traces[i] = Columns(self._stacks)
                for at in range(0, len(trace), _BATCH):
                    traces[i].extend(trace[at : at + _BATCH])
        self._put_back(traces, [*memo], [*fields.get("segments", []), *(fields.get("segments_before") or [])])
        return {**fields, "device_traces": traces, "stacks": self._stacks.stacks}

    def _put_back(self, traces: list[Columns], memo: list[Any], segments: list[Any]) -> None:
        """Put the events that were cut into the columns, and lists of frames that gave way to others into segments."""
        objects, values = self._cutter.values(memo) if self._cutter.count else ([], {})
        used = [trace.filled(values, objects, self._cutter) for trace in traces if values]
        if used and {*_numpy().sum(used, axis=0).tolist()} != {1}:
            raise Odd
        for trace in traces:
            if not values and (len(trace) != len(trace.numbers) or trace.numbers.tobytes().strip(b"\xff")):
                raise Odd
            trace.check()
        for segment in segments:
            for holder in (segment, *segment.get("blocks", [])):
                frames = self._cutter.object_of(holder.get("frames"), objects)
                if "frames" in holder:
                    holder["frames"] = frames
                self._stacks.put_back(frames)


class _Chunks(io.RawIOBase):
    """A stream of the bytes of an iterator."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._left = chunks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._left:
            try:
                self._left = next(self._chunks)
            except StopIteration:
                return 0
        view = memoryview(buffer)
        count = min(len(view), len(self._left))
        view[:count], self._left = self._left[:count], self._left[count:]
        return count


class _TooLong(Exception):
    """Raised where a pickle has more bytes than any snapshot."""


class _Bounded(io.RawIOBase):
    """A stream that ends in an exception after so many bytes, or where what was made of them takes too much memory."""

    def __init__(self, stream: BinaryIO | gzip.GzipFile, most: int) -> None:
        self._stream, self._most, self._read = stream, most, 0
        self._memory_before = memory_held()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """`buffer` is writable memory, for which Python 3.11 has no type."""
        view = memoryview(buffer)
        data = self._stream.read(len(view))
        self._read += len(data)
        if self._read > self._most:
            raise _TooLong
        if memory_held() - self._memory_before > _ROOM_BYTES + _ROOM_PER_BYTE * self._read:
            raise MemoryError
        view[: len(data)] = data
        return len(data)


def read_plain_pickle(path: Path) -> object:
    """The object that a pickle holds, gzipped or not, made of dicts, lists, tuples, texts and numbers alone.

    Raises InputError, in one line with the file, for a pickle that asks for anything else (nothing of it has run
    then), that is cut short or broken, or that takes more bytes, memory or time than a snapshot of its size can.
    """
    _read_apart(path, "check")
    return _load(path)


def read_with_columns(path: Path) -> object:
    """What a snapshot's file holds; where it can be, with Columns in place of the lists of events (`device_traces`)."""
    content = _read_apart(path, "columns")
    return _load(path) if content is None else content


def _read_apart(path: Path, what: str) -> object:
    """What a process of its own makes of the file, which is ended after so many seconds of work; None where it has only
    read it to the end."""
    try:
        check_regular(path)
        size = path.stat().st_size
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or one_line(error)}") from None
    seconds = _LEAST_SECONDS + _most_bytes(path, size) // _BYTES_PER_SECOND
    command = [sys.executable, "-P", "-m", __name__, str(path.absolute()), str(path), str(seconds), what]
    null = subprocess.DEVNULL
    # What NumPy gives back of a block is kept for the next: the system's pages would take as long as to decode it.
    kept = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(64 * MIB), "MALLOC_TRIM_THRESHOLD_": str(64 * MIB)}
    with subprocess.Popen(command, stdin=null, stdout=subprocess.PIPE, stderr=null, env=kept) as process:
        assert process.stdout
        try:
            said = _handed_over(process.stdout)
        except BaseException:
            process.kill()
            raise
    if process.returncode == EXIT_WRONG_INPUT:
        raise InputError(str(said))
    if process.returncode == -signal.SIGXCPU:
        raise InputError(f"{path}: refused: reading it takes longer than a snapshot of its size can ({seconds} s)")
    if process.returncode != EXIT_DONE:
        raise InputError(f"{path}: refused: reading it ends the process that tries (code {process.returncode})")
    return said


def _handed_over(stream: IO[bytes]) -> object:
    """What `_hand_over` wrote: what a snapshot holds, a message, or None."""
    try:
        with without_collector():
            said = _PlainUnpickler(stream).load()
            if type(said) is not dict:
                return said
            content, stacks = cast("dict[str, Any]", said), StackPlaces()
            stacks.stacks = content.pop("stacks")
            content["device_traces"] = [Columns.read(each, stacks, stream) for each in content["device_traces"]]
    except (*_FAULTS, _Refused):  # its exit code says what happened
        return None
    return content


def _hand_over(content: dict[str, Any] | str | None) -> None:
    """Write it for `_handed_over`. Raises RecursionError, having written nothing, where it nests too deeply."""
    traces: list[Columns] = content["device_traces"] if isinstance(content, dict) else []
    plain = {**content, "device_traces": [each.distinct() for each in traces]} if isinstance(content, dict) else content
    text, stream = pickle.dumps(plain, protocol=5), sys.stdout.buffer
    stream.write(text)
    for columns in traces:
        for column in columns.arrays:
            column.tofile(stream)


def main() -> int:
    """Read the pickle in argv[1] within the limits, for `_read_apart`, and hand over what is in it, or wrong."""
    import resource  # noqa: PLC0415 - not on every system

    path, named, seconds, what = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    code = EXIT_DONE
    try:
        with bounded_memory(_ROOM_BYTES + _ROOM_PER_BYTE * _most_bytes(path, path.stat().st_size)):
            _read_and_hand_over(path, named, what)
    except InputError as error:
        _hand_over(str(error).encode(errors="replace").decode())
        code = EXIT_WRONG_INPUT
    sys.stdout.flush()
    os._exit(code)  # what was read is not taken apart object by object


def _read_and_hand_over(path: Path, named: str, what: str) -> None:
    if what == "columns":
        # What goes wrong on the way with columns is told as the plain way tells it.
        with contextlib.suppress(Odd, InputError, *_FAULTS, MemoryError):
            return _hand_over(
                cast("dict[str, Any]", _load(path, named, lambda stream: _ColumnsUnpickler(stream).content()))
            )
    _load(path, named)
    return _hand_over(None)


def _most_bytes(path: Path, size: int) -> int:
    """Bytes that a pickle of this size on disk may unpack to."""
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
    return min(LARGEST_BYTES, _GZIP_LEAST + size * _GZIP_MOST) if packed else min(LARGEST_BYTES, size)


def _plainly(stream: BinaryIO) -> object:
    return _PlainUnpickler(stream).load()


def _load(path: Path, named: str | None = None, load: Callable[[BinaryIO], object] = _plainly) -> object:
    """The object, read in this process. `named`: what messages name, where it is not the path."""
    name = named or str(path)
    most = LARGEST_BYTES
    try:
        most = _most_bytes(path, path.stat().st_size)
        with path.open("rb") as file:
            head = file.read(2)
            file.seek(0)
            packed = head == _GZIP
            if not head:
                raise InputError(f"{name}: the file is empty")
            with gzip.GzipFile(fileobj=file) if packed else contextlib.nullcontext(file) as stream:
                reader = io.BufferedReader(_Bounded(stream, most), _BUFFER_BYTES)
                with without_collector():
                    return load(reader)
    except _Refused as refused:
        refused_name = one_line(refused, _LONGEST_NAME)
        raise InputError(
            f"{name}: refused, for it is no plain data: it asks for {refused_name}; nothing of it was run. "
            "A snapshot of torch.cuda.memory._dump_snapshot() asks for nothing"
        ) from None
    except _TooLong:
        raise InputError(
            f"{name}: unpacks to more than {format_bytes(most)}, which no snapshot of its size that can be read does"
        ) from None
    except MemoryError:
        raise InputError(f"{name}: reading it takes more memory than a snapshot of its size can need") from None
    except gzip.BadGzipFile as fault:
        raise InputError(f"{name}: broken gzip: {one_line(fault)}") from None
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or one_line(error)}") from None
    except _FAULTS as fault:
        raise InputError(f"{name}: no memory snapshot: broken, cut short or no pickle ({one_line(fault)})") from None


if __name__ == "__main__":
    sys.exit(main())
