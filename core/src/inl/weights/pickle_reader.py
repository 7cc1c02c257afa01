"""Reads the data of a pickle and can execute nothing: no name in it is ever imported.

A pickle is a program for a stack machine. This one knows the instructions that build
plain values, and the three calls that rebuild a tensor, as descriptions of where the
tensor lies. Whatever else a file names is refused, by name.
"""

from __future__ import annotations

import pickletools
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from inl.errors import CheckpointError
from inl.weights.files import show

STORAGES: Final = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
"""Names of ``torch`` under which memory is stored, and our dtypes."""


class Name(NamedTuple):
    """Something of a module, as the file calls it; never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Storage(NamedTuple):
    """A piece of memory that the archive holds under ``key``."""

    dtype: str
    key: str
    size: int
    """Elements."""


class StoredTensor(NamedTuple):
    """A tensor as it is to be rebuilt."""

    storage: Storage
    offset: int
    """Element of the storage at which it begins."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]


PUSHED: Final = frozenset(
    (
        "BINBYTES", "BINFLOAT", "BININT", "BININT1", "BININT2", "BINSTRING",
        "BINUNICODE", "BINUNICODE8", "LONG1", "SHORT_BINBYTES", "SHORT_BINSTRING",
        "SHORT_BINUNICODE",
    )
)  # fmt: skip
"""Instructions whose argument is the value."""

CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
IGNORED: Final = frozenset(["PROTO", "FRAME"])
TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_pickle(data: bytes, where: str) -> Any:
    """The value that a pickle describes, tensors as :class:`StoredTensor`.

    Raises :class:`CheckpointError`, begun with ``where``, for every name and every
    instruction but those that saving a dict of tensors leads to.
    """
    machine = _Machine(where)
    try:
        with warnings.catch_warnings():
            # Odd escapes in names: those are refused all the same.
            warnings.simplefilter("ignore")
            for code, argument, _ in pickletools.genops(data):
                machine.step(code.name, argument)
        return machine.result()
    except CheckpointError:
        raise
    # What a damaged program does to the stack, or to pickletools.
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{where}: not a whole pickle: {type(error).__name__}: {error!s:.80}; "
            "accepted: what torch.save writes"
        ) from error


class _Machine:
    """A stack, the marked stacks below it, and what was noted by number."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.notes: dict[int, Any] = {}
        self.done = False
        self.instructions: dict[str, Callable[[Any], None]] = {
            "MARK": self._mark,
            "EMPTY_DICT": lambda _: self.stack.append({}),
            "EMPTY_LIST": lambda _: self.stack.append([]),
            "EMPTY_TUPLE": lambda _: self.stack.append(()),
            "TUPLE": lambda _: self._push_marked(tuple),
            "APPEND": lambda _: self._append([self.stack.pop()]),
            "APPENDS": lambda _: self._append(self._marked()),
            "SETITEM": lambda _: self._set([self.stack.pop(-2), self.stack.pop()]),
            "SETITEMS": lambda _: self._set(self._marked()),
            "BINPUT": self._note,
            "LONG_BINPUT": self._note,
            "MEMOIZE": lambda _: self._note(len(self.notes)),
            "BINGET": lambda number: self.stack.append(self.notes[number]),
            "LONG_BINGET": lambda number: self.stack.append(self.notes[number]),
            "GLOBAL": self._name,
            "STACK_GLOBAL": self._name_of_stack,
            "BINPERSID": self._storage,
            "REDUCE": self._call,
            "BUILD": self._build,
            "STOP": self._stop,
        }

    def step(self, code: str, argument: Any) -> None:
        """Carry one instruction out."""
        if code in PUSHED:
            self.stack.append(argument)
        elif code in CONSTANTS:
            self.stack.append(CONSTANTS[code])
        elif code in TUPLES:
            parts = [self.stack.pop() for _ in range(TUPLES[code])]
            self.stack.append(tuple(reversed(parts)))
        elif code in self.instructions:
            self.instructions[code](argument)
        elif code not in IGNORED:
            raise self._refusal(f"the instruction {code}", "those of a dict of tensors")

    def result(self) -> Any:
        """The only value that is left."""
        if not self.done or len(self.stack) != 1 or self.below:
            raise ValueError("it ends in the middle")
        return self.stack[0]

    def _refusal(self, found: str, accepted: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: found {found}; accepted: {accepted}")

    def _mark(self, _: Any) -> None:
        self.below.append(self.stack)
        self.stack = []

    def _marked(self) -> list[Any]:
        found, self.stack = self.stack, self.below.pop()
        return found

    def _push_marked(self, kind: Callable[[list[Any]], Any]) -> None:
        found = self._marked()
        self.stack.append(kind(found))

    def _append(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise TypeError("an item for what is no list")
        self.stack[-1].extend(items)

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        keys, values = items[::2], items[1::2]
        plain = all(type(key) in (str, int, float, bool) for key in keys)
        if type(target) is not dict or not plain:
            raise TypeError("an item for what is no dict of names")
        target.update(zip(keys, values, strict=True))

    def _note(self, number: int) -> None:
        self.notes[number] = self.stack[-1]

    def _name(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._push_name(module, name)

    def _name_of_stack(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._push_name(module, name)

    def _push_name(self, module: Any, name: Any) -> None:
        found = Name(module, name)
        if found not in CALLS and not (module == "torch" and name in STORAGES):
            raise self._refusal(
                f"the name {show(f'{module}.{name}')}, which would be executed",
                "tensors, and plain values, in dicts",
            )
        self.stack.append(found)

    def _storage(self, _: Any) -> None:
        kind, storage, key, _place, size = self.stack.pop()
        sound = kind == "storage" and type(storage) is Name and type(key) is str
        if not sound or storage.name not in STORAGES or not _whole(size):
            raise self._refusal(f"a reference to {show(storage)}", "a storage of torch")
        self.stack.append(Storage(STORAGES[storage.name], key, size))

    def _call(self, _: Any) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if type(name) is not Name or name not in CALLS or type(arguments) is not tuple:
            raise self._refusal(f"a call of {show(name)}", ", ".join(map(str, CALLS)))
        self.stack.append(CALLS[name](*arguments))

    def _build(self, _: Any) -> None:
        # An ordered dict of weights has attributes, versions of its modules: left out.
        self.stack.pop()
        if type(self.stack[-1]) is not dict:
            raise self._refusal(
                f"attributes for a {type(self.stack[-1]).__name__}", "those of a dict"
            )

    def _stop(self, _: Any) -> None:
        self.done = True


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


def _sizes(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple or not all(map(_whole, values)):
        raise TypeError("sizes that are no whole numbers from 0")
    return values


def _tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, *_rest: Any
) -> StoredTensor:
    if type(storage) is not Storage or not _whole(offset):
        raise TypeError("a tensor without storage")
    return StoredTensor(storage, offset, _sizes(shape), _sizes(strides))


def _parameter(tensor: Any, *_rest: Any) -> StoredTensor:
    if type(tensor) is not StoredTensor:
        raise TypeError("a parameter that is no tensor")
    return tensor


def _dict(items: Any = ()) -> dict[Any, Any]:
    if items:
        raise TypeError("an ordered dict with items of its own")
    return {}


CALLS: Final[dict[Name, Callable[..., Any]]] = {
    Name("collections", "OrderedDict"): _dict,
    Name("torch._utils", "_rebuild_tensor_v2"): _tensor,
    Name("torch._utils", "_rebuild_parameter"): _parameter,
}
"""What may be called, and what is done instead."""
