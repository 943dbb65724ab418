"""A worker process of the reward pool: reads calls from its standard input, answers on what was its standard output.

Frames are a kind (one byte), a length (8 bytes, little endian) and that many bytes. The parent sends ``CALL`` (key of a
function and arguments) and, when asked by ``NEED``, ``LOAD`` (the function); the worker answers ``READY`` when the function
is loaded, then ``VALUE`` (a float) or ``FAILED`` (a text). Only the parent's frames are unpickled, never the worker's.
This module imports nothing but the standard library until a function asks for more.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import math
import os
import pickle
import struct
import sys
import threading
import time
import traceback
from collections import OrderedDict
from typing import Any, BinaryIO

CALL, LOAD, NEED, READY, VALUE, FAILED, START = b"C", b"L", b"N", b"R", b"V", b"F", b"S"
HEADER = struct.Struct("<cQ")
FLOAT = struct.Struct("<d")
KEPT_FUNCTIONS = 64


def as_float(value: Any) -> float:
    """A finite float out of a bool, a number, or an array or tensor of one element.

    Raises:
        TypeError: it is no number.
        ValueError: it is NaN or infinite.
    """
    if isinstance(value, str | bytes) or value is None:
        raise TypeError(f"it returned {value!r}, not a number")
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except Exception as error:
        raise TypeError(f"it returned {type(value).__name__}, not one number") from error
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}, not a finite number")
    return number


def write_frame(stream: BinaryIO, kind: bytes, body: bytes = b"") -> None:
    """Write one frame and flush it."""
    stream.write(HEADER.pack(kind, len(body)) + body)
    stream.flush()


def read_frame(stream: BinaryIO) -> tuple[bytes, bytes]:
    """Read one frame.

    Raises:
        EOFError: the other side is gone.
    """
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    kind, size = HEADER.unpack(header)
    body = stream.read(size)
    if len(body) < size:
        raise EOFError
    return kind, body


def die_with_parent(parent: int) -> None:
    """End this process when its parent ends, however that ends, also while a function hangs."""
    if sys.platform == "linux":
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; the thread that started us lives as long as we do
        if os.getppid() != parent:
            os._exit(1)
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _load(body: bytes) -> Any:
    """Unpickle a function and import what it says it will need, before its time begins to count."""
    function = pickle.loads(body)  # noqa: S301 - from our own parent
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    for module in getattr(inner, "worker_imports", ()):
        importlib.import_module(module)
    return function


def _call(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> float:
    value = function(*arguments, **keywords)
    if inspect.isawaitable(value):

        async def result() -> Any:
            return await value

        value = asyncio.run(result())
    return as_float(value)


def main() -> None:
    """Serve calls until the parent closes the pipe."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # what a function prints goes to the parent's standard error, not into the answers
    sys.stdout = sys.stderr
    kind, body = read_frame(requests)
    parent, sys.path[:] = pickle.loads(body)  # noqa: S301 - from our own parent
    die_with_parent(parent)
    functions: OrderedDict[bytes, Any] = OrderedDict()
    write_frame(answers, READY)
    while True:
        try:
            kind, body = read_frame(requests)
        except EOFError:
            return
        assert kind == CALL
        key, body = body[:8], body[8:]
        try:
            if key not in functions:
                write_frame(answers, NEED)
                functions[key] = _load(read_frame(requests)[1])
                if len(functions) > KEPT_FUNCTIONS:
                    functions.popitem(last=False)
            functions.move_to_end(key)
            arguments, keywords = pickle.loads(body)  # noqa: S301 - from our own parent
            write_frame(answers, READY)
            number = _call(functions[key], arguments, keywords)
        except EOFError:
            return
        except Exception:
            write_frame(answers, FAILED, traceback.format_exc().encode("utf-8", "backslashreplace"))
        else:
            write_frame(answers, VALUE, FLOAT.pack(number))


if __name__ == "__main__":
    main()
