"""What travels between the notebook and the ranks, and how.

Python's own pickle sends a function as "module and name", and a rank cannot import what
was typed into a cell. Here functions and classes of ``__main__`` travel by value
(cloudpickle), everything else as always:

    notebook                                  rank
    pack_call(fn, args, kwargs)  ── bytes ──▶  unpack_call(...)
    unpack(...)                  ◀── bytes ──  pack(result)

Three things are added to cloudpickle. Code keeps its place ("Cell In[5]", line 3) and
its source, so that a rank's traceback shows the line. Tensors travel as bytes and come
out on the CPU, each rank's own copy: torch.multiprocessing would put them in shared
memory, and two ranks would then step one weight. `shared` asks for one copy on purpose.
What cannot travel is named, variable by variable (`explain`).
"""

import functools
import importlib
import inspect
import io
import linecache
import marshal
import os
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import cloudpickle

from ddp_lab.errors import NotSendable

__all__ = [
    "Packed",
    "explain",
    "main_by_value",
    "pack",
    "pack_call",
    "shared",
    "unpack",
    "unpack_call",
]

_received: list[Any] = []  # shared storages of the call that is being unpacked


class _Shared:
    """A value whose tensors lie in shared memory; a rank receives the value itself."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.addresses = frozenset(_put_in_shared_memory(value))


def shared(value: Any) -> Any:
    """Let all ranks of this machine use one copy of the tensors in ``value``.

    Without it each rank gets its own copy: safe, but a dataset of 2 GB on 8 ranks then
    fills 16 GB. A rank that writes into a shared tensor changes it for all of them, and
    for the notebook.

    Args:
        value: a CPU tensor, or anything that holds some: a dataset, a dict, a module.
            They move to shared memory where they are.

    Returns:
        A wrapper to pass to `launch`; the function receives ``value`` without it.

    **Cost**: one copy into shared memory, at the call.
    """
    return value if isinstance(value, _Shared) else _Shared(value)


@dataclass
class Packed:
    """A call in travelling form, the same bytes for every rank."""

    blob: bytes
    sources: dict[str, list[str]]  # source lines of cells, by the name in tracebacks
    storages: list[Any] = field(default_factory=list)  # shared ones, sent as handles


def main_by_value(_: Any, obj: Any) -> Any:
    """Send what a cell or script defines by value to processes of a rank's own.

    A method for multiprocessing's pickler, in ranks: a DataLoader worker that is
    spawned would look for the class in a ``__main__`` that has never run there.
    """
    if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
        return cloudpickle.loads, (cloudpickle.dumps(obj),)
    return NotImplemented


def _is_odd_module(obj: Any) -> bool:
    """A module of a class of its own, of which cloudpickle knows nothing.

    torch.classes is one, and cloudpickle takes it along where it reads `data.classes`.
    """
    if not isinstance(obj, types.ModuleType) or type(obj) is types.ModuleType:
        return False
    return sys.modules.get(obj.__name__) is obj


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=5)
        self.sources: dict[str, list[str]] = {}
        self.main_names: dict[str, Any] = {}  # by-value classes and functions met
        self.storages: list[Any] = []  # shared ones met
        self.addresses: set[int] = set()  # ... and where they lie
        self.move = False  # put every storage into shared memory
        self._names: dict[str, str] = {}  # file name of code -> name in tracebacks
        self._seen: dict[int, Any] = {}  # address -> storage, so that views stay views

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            return marshal.loads, (marshal.dumps(self._renamed(obj)),)
        if _is_odd_module(obj):
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, _Shared):
            self.addresses |= obj.addresses
            return _same, (obj.value,)
        torch = sys.modules.get("torch")  # not imported: then there is no tensor
        if torch is not None:
            if isinstance(obj, torch.storage.TypedStorage):
                return _typed_storage, (self._once(obj._untyped_storage), obj.dtype)
            if isinstance(obj, torch.UntypedStorage):
                return self._reduce_storage(obj)
        if getattr(obj, "__module__", None) == "__main__" and isinstance(
            obj, type | types.FunctionType
        ):
            name = obj.__name__
            if getattr(sys.modules["__main__"], name, None) is obj:
                self.main_names[name] = obj
        return super().reducer_override(obj)

    def _once(self, storage: Any) -> Any:
        """The same Python object for the same memory: two views stay two views."""
        return self._seen.setdefault(storage.data_ptr() or -id(storage), storage)

    def _reduce_storage(self, storage: Any) -> tuple[Any, ...]:
        import torch

        if self.move and storage.device.type == "cpu":
            # by descriptor, whatever torch's sharing strategy is: a name would have to
            # be opened again, and a rank would get a copy
            storage._share_fd_cpu_()
            self.addresses.add(storage.data_ptr())
            self._seen[storage.data_ptr()] = storage
        if storage.data_ptr() in self.addresses and storage.nbytes():
            self.storages.append(storage)
            return _shared_storage, (len(self.storages) - 1,)
        flat = torch.empty(0, dtype=torch.uint8).set_(storage.cpu())
        return _own_storage, (pickle.PickleBuffer(flat.numpy()),)  # type: ignore[arg-type]

    def _renamed(self, code: types.CodeType) -> types.CodeType:
        """Call a cell "Cell In[5]" instead of "/tmp/ipykernel_12/345.py"."""
        if code.co_filename not in self._names:
            self._names[code.co_filename] = self._name(code.co_filename)
        return code.replace(
            co_filename=self._names[code.co_filename],
            co_consts=tuple(
                self._renamed(const) if isinstance(const, types.CodeType) else const
                for const in code.co_consts
            ),
        )

    def _name(self, filename: str) -> str:
        name = _cell_name(filename) or filename
        if name == filename and os.path.exists(filename):
            return name  # a real file: the rank reads the source itself
        lines = linecache.getlines(filename)
        # without history (nbval) every cell is In[1]: keep their sources apart
        number = 1
        unique = name
        while self.sources.get(unique, lines) != lines:
            number += 1
            unique = f"{name} ({number})"
        if lines:
            self.sources[unique] = lines
        return unique


def _cell_name(filename: str) -> str | None:
    """ "Cell In[5]" for the code of a notebook cell, None for anything else."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    try:
        parts = shell.compile.format_code_name(filename)
    except AttributeError:  # IPython before 8: <ipython-input-5-0f1e2d3c4b5a>
        found = re.fullmatch(r"<ipython-input-(\d+)-\w+>", filename)
        return f"Cell In[{found[1]}]" if found else None
    return " ".join(parts) if parts else None


def _same(value: Any) -> Any:
    return value


def _own_storage(data: Any) -> Any:
    import torch

    if not len(data):
        return torch.UntypedStorage(0)
    if not isinstance(data, bytearray):  # bytes are read-only, weights are not
        data = bytearray(data)
    return torch.frombuffer(data, dtype=torch.uint8).untyped_storage()


def _shared_storage(index: int) -> Any:
    return _received[index]


def _typed_storage(untyped: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _put_in_shared_memory(value: Any) -> set[int]:
    pickler = _Pickler(io.BytesIO())
    pickler.move = True
    try:
        pickler.dump(value)
    except Exception as error:
        raise explain("shared(...)", value, error) from None
    return pickler.addresses


def pack(value: Any) -> bytes:
    """Turn a value into bytes, by value where needed; may raise anything."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def unpack(blob: bytes) -> Any:
    """Rebuild what `pack` made. Only for bytes from our own processes."""
    return _loads(blob)


def _loads(blob: bytes) -> Any:
    """Unpickle, and take sparse tensors off the list that torch keeps of them.

    torch notes each sparse tensor it rebuilds and has only `torch.load` look through
    the notes: the next one, of whatever file, would warn about ours.
    """
    value = pickle.loads(blob)
    torch = sys.modules.get("torch")
    look_through = getattr(
        getattr(torch, "_utils", None), "_validate_loaded_sparse_tensors", None
    )
    if look_through is not None:
        look_through()
    return value


def pack_call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Packed:
    """Turn a call into bytes, before any process is started.

    Raises:
        NotSendable: something cannot travel; the message names it.
    """
    addresses: set[int] = set()
    while True:
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.addresses |= addresses
        try:
            # main_names fills while fn and its arguments are pickled, and comes last
            pickler.dump((fn, args, kwargs, pickler.main_names))
        except Exception as error:
            _explain_call(fn, args, kwargs, error)
        if pickler.addresses <= addresses:
            return Packed(file.getvalue(), pickler.sources, pickler.storages)
        # once more: what is met before it is known to be shared has gone as a copy
        addresses = pickler.addresses


def unpack_call(
    blob: bytes, sources: dict[str, list[str]], storages: list[Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Rebuild a call in a rank.

    The names that were defined in cells also appear in the rank's ``__main__``, where
    pickle looks for them: ``torch.save(model)`` and DataLoader workers need that.
    """
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    _received[:] = storages
    try:
        fn, args, kwargs, main_names = _loads(blob)
    finally:
        _received.clear()
    vars(sys.modules["__main__"]).update(main_names)
    return fn, args, kwargs


# What cannot travel ---------------------------------------------------------------


def _explain_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: Exception,
) -> NoReturn:
    try:
        names = list(inspect.signature(fn).bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        names = []
    for index, value in enumerate(args):
        name = names[index] if index < len(names) else f"argument {index + 1}"
        if not _travels(value):
            raise explain(name, value, error) from None
    for name, value in kwargs.items():
        if not _travels(value):
            raise explain(name, value, error) from None
    raise explain(getattr(fn, "__name__", "the function"), fn, error) from None


def explain(name: str, value: Any, error: Exception) -> NotSendable:
    """Find the innermost part of ``value`` that cannot travel, and say what to do."""
    path, culprit = name, value
    seen: set[int] = set()
    while id(culprit) not in seen and len(seen) < 20:
        seen.add(id(culprit))
        for step, part in _parts(culprit):
            if not _travels(part):
                # a variable that the function uses stands for itself
                path = step if step.isidentifier() else path + step
                culprit = part
                break
    kind = type(culprit).__name__
    what = next((text for word, text in _KINDS if word in kind.lower()), None)
    if what is None:
        what = f"a {kind} ({' '.join(str(error).split())})"
    return NotSendable(
        f"`{path}` is {what}, which cannot be sent to another process: "
        "build it inside the function, on each rank"
    )


_KINDS = [
    ("generator", "a generator"),
    ("iterator", "an iterator over something that cannot be copied"),
    ("textiowrapper", "an open file"),
    ("buffered", "an open file"),
    ("fileio", "an open file"),
    ("lock", "a lock"),
    ("condition", "a lock"),
    ("socket", "a network connection"),
    ("connection", "a connection"),
    ("thread", "a thread"),
    ("processgroup", "a process group"),
    ("interactiveshell", "the notebook's own shell"),
]


def _travels(value: Any) -> bool:
    try:
        pack(value)
    except Exception:
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value is made of, each part with the text that leads to it."""
    if isinstance(value, _Shared):
        yield "", value.value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"[{key!r}]", item
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    elif isinstance(value, functools.partial):
        yield ".func", value.func
        yield from ((f".args[{i}]", item) for i, item in enumerate(value.args))
        yield from ((f".keywords[{k!r}]", v) for k, v in value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif isinstance(value, types.FunctionType):
        used = inspect.getclosurevars(value)
        yield from used.nonlocals.items()
        yield from used.globals.items()
        for index, default in enumerate(value.__defaults__ or ()):
            yield f".__defaults__[{index}]", default
    elif isinstance(value, type):
        yield from ((f".{name}", item) for name, item in vars(value).items())
    else:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield from ((f".{name}", item) for name, item in attributes.items())
