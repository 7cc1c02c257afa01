"""Safe pickle interpreter for ``torch.save`` files: imports and executes nothing.

A pickle is a program for a stack machine. This interpreter supports the instructions
that build plain values, and replaces the three calls that rebuild a tensor by
descriptions of it. Any other global name is refused with an error. The number of
instructions is bounded, and so is the memory of the values that they create.
"""

from __future__ import annotations

import pickletools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from inl.checkpoints.files.pickle_values import (
    CALLS,
    STORAGES,
    GlobalName,
    TorchStorage,
    is_size,
)
from inl.checkpoints.files.tensor_file import OVERHEAD, show
from inl.errors import CheckpointError

PUSHED: Final = frozenset(
    (
        "BINBYTES", "BINFLOAT", "BININT", "BININT1", "BININT2", "BINSTRING",
        "BINUNICODE", "BINUNICODE8", "LONG1", "SHORT_BINBYTES", "SHORT_BINSTRING",
        "SHORT_BINUNICODE",
    )
)  # fmt: skip
"""Instructions that push their argument."""

CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
IGNORED: Final = frozenset(["PROTO", "FRAME"])
TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}

MAX_INSTRUCTIONS: Final = 1_000_000
"""Limit of the instructions of a pickle; one tensor takes 40."""
MAX_KEY: Final = 1 << 32
"""Limit of an integer that is a key of a dict. Larger ones can be chosen so that they
collide in its table, which takes quadratic time."""

INSTRUCTION_BYTES: Final = 100
"""Upper bound of the memory of what most instructions leave: a slot of a stack, of a
list, of a dict or of the memo, while it grows, and a number or a small tuple."""
CREATED_BYTES: Final[Mapping[str, int]] = {
    "MARK": 160,
    "EMPTY_LIST": 160,
    "EMPTY_DICT": 330,
    "REDUCE": 600,
    "BINPERSID": 300,
    "GLOBAL": 400,
    "STACK_GLOBAL": 400,
}
"""Upper bound of the memory of the values that the other instructions create."""
TEXT_WIDTH: Final = 4
"""Bytes per byte of a text, if it has one character outside of the basic plane."""


def read_pickle(data: bytes, where: str, file_size: int = 0) -> Any:
    """Evaluate a pickle; tensors become :class:`StoredTensor`.

    file_size: size of the file with the pickle, if it is a part. Raises
    :class:`CheckpointError`, prefixed with ``where``, for any name or
    instruction that saving a dict of tensors does not produce, and for values that
    would take more than three times the size of the file.
    """
    machine = _StackMachine(where, 3 * max(len(data), file_size) + OVERHEAD)
    try:
        with warnings.catch_warnings():
            # pickletools warns of invalid escapes in names, which are refused anyway.
            warnings.simplefilter("ignore")
            for number, (code, argument, _) in enumerate(pickletools.genops(data)):
                if number == MAX_INSTRUCTIONS:
                    machine.refuse(f"over {number} instructions", f"up to {number}")
                machine.step(code.name, argument)
        return machine.result()
    except CheckpointError:
        raise
    # Raised by pickletools or by stack operations if the pickle is damaged.
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{where}: not a whole pickle: {type(error).__name__}: {error!s:.80}; "
            "accepted: a file written by torch.save"
        ) from error


class _StackMachine:
    """Interpreter state: the stack, the stacks saved by MARK, and the memo."""

    def __init__(self, where: str, memory: int) -> None:
        self.where = where
        self.memory = self.free = memory
        self.stack: list[Any] = []
        self.saved: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
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
            "BINPUT": self._memoize,
            "LONG_BINPUT": self._memoize,
            "MEMOIZE": lambda _: self._memoize(len(self.memo)),
            "BINGET": lambda number: self.stack.append(self.memo[number]),
            "LONG_BINGET": lambda number: self.stack.append(self.memo[number]),
            "GLOBAL": self._global,
            "STACK_GLOBAL": self._stack_global,
            "BINPERSID": self._storage,
            "REDUCE": self._reduce,
            "BUILD": self._build,
            "STOP": self._stop,
        }

    def step(self, code: str, argument: Any) -> None:
        """Execute one instruction, if its result fits the memory."""
        self.free -= CREATED_BYTES.get(code, INSTRUCTION_BYTES)
        if isinstance(argument, str | bytes):
            self.free -= TEXT_WIDTH * len(argument)
        if self.free < 0:
            self.refuse(f"values of over {self.memory} bytes", "less of them")
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
            self.refuse(f"the instruction {code}", "those of a dict of tensors")

    def result(self) -> Any:
        """Return the value on the stack after STOP."""
        if not self.done or len(self.stack) != 1 or self.saved:
            raise ValueError("truncated")
        return self.stack[0]

    def refuse(self, found: str, accepted: str) -> NoReturn:
        raise CheckpointError(f"{self.where}: found {found}; accepted: {accepted}")

    def _mark(self, _: Any) -> None:
        self.saved.append(self.stack)
        self.stack = []

    def _marked(self) -> list[Any]:
        """Pop the items above the last mark."""
        items, self.stack = self.stack, self.saved.pop()
        return items

    def _push_marked(self, kind: Callable[[list[Any]], Any]) -> None:
        items = self._marked()
        self.stack.append(kind(items))

    def _append(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise TypeError("items appended to a value that is not a list")
        self.stack[-1].extend(items)

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        keys, values = items[::2], items[1::2]
        if type(target) is not dict or not all(map(_is_key, keys)):
            raise TypeError("items set on a value that is not a dict, or a bad key")
        target.update(zip(keys, values, strict=True))

    def _memoize(self, number: int) -> None:
        self.memo[number] = self.stack[-1]

    def _global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._push_global(module, name)

    def _stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._push_global(module, name)

    def _push_global(self, module: Any, name: Any) -> None:
        # Only texts are hashed: the hash of nested tuples takes exponential time.
        if type(module) is not str or type(name) is not str:
            raise TypeError("a global name that is not a text")
        reference = GlobalName(module, name)
        if reference not in CALLS and not (module == "torch" and name in STORAGES):
            self.refuse(
                f"the name {show(f'{module}.{name}')}, which would be executed",
                "tensors, and plain values, in dicts",
            )
        self.stack.append(reference)

    def _storage(self, _: Any) -> None:
        kind, storage, key, _location, size = self.stack.pop()
        valid = kind == "storage" and type(storage) is GlobalName and type(key) is str
        if not valid or storage.name not in STORAGES or not is_size(size):
            self.refuse(f"a reference to {show(storage)}", "a storage of torch")
        self.stack.append(TorchStorage(STORAGES[storage.name], key, size))

    def _reduce(self, _: Any) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        callable_name = type(name) is GlobalName and name in CALLS
        if not callable_name or type(arguments) is not tuple:
            self.refuse(f"a call of {show(name)}", ", ".join(map(str, CALLS)))
        self.stack.append(CALLS[name](*arguments))

    def _build(self, _: Any) -> None:
        # Attributes of a state dict (versions of its modules) are discarded.
        self.stack.pop()
        if type(self.stack[-1]) is not dict:
            self.refuse(
                f"attributes for a {type(self.stack[-1]).__name__}", "those of a dict"
            )

    def _stop(self, _: Any) -> None:
        self.done = True


def _is_key(value: Any) -> bool:
    """Return whether a value may be a key of a dict."""
    return type(value) in (str, bool) or (type(value) is int and abs(value) < MAX_KEY)
