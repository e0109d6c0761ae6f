"""What travels, how it arrives, and how what cannot travel is named."""

import functools
import os
import pickle
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from ddp_lab.errors import NotSendable
from ddp_lab.ranks._pickling import (
    _cell_name,
    pack,
    pack_call,
    shared,
    unpack,
    unpack_call,
)


def there_and_back(value):
    return unpack(pack(value))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.tensor([1.5], dtype=torch.bfloat16),
        torch.empty(0, 4),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor([1 + 2j]),
        torch.nn.Parameter(torch.ones(2)),
        torch.eye(3).to_sparse(),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}-{type(t).__name__}",
)
def test_tensors(tensor):
    found = there_and_back(tensor)
    assert type(found) is type(tensor)
    assert found.dtype == tensor.dtype
    assert found.requires_grad == tensor.requires_grad
    assert found.layout == tensor.layout
    assert torch.equal(found.to_dense(), tensor.to_dense())


def test_a_tensor_can_be_written_to():
    found = there_and_back(torch.zeros(3))
    found += 1
    assert found.tolist() == [1, 1, 1]


def test_views_of_one_storage_stay_views():
    base = torch.zeros(4)
    first, second = there_and_back((base[:2], base[1:]))
    first[1] = 5.0
    assert second[0] == 5.0


def test_tied_weights_stay_tied():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    found = there_and_back(model)
    assert found[1].weight is found[0].weight


def test_a_loss_with_its_graph_comes_as_a_number():
    weight = torch.ones(1, requires_grad=True)
    assert there_and_back((weight * 2).sum()).item() == 2.0


def test_one_copy_of_what_is_shared():
    data = {"images": torch.zeros(4), "labels": [torch.zeros(2)], "name": "digits"}
    wrapped = shared(data)
    assert data["images"].is_shared()
    packed = pack_call(len, (wrapped, torch.ones(3)), {"again": wrapped})
    assert len(packed.storages) == 2
    _, (found, _), kwargs = unpack_call(packed.blob, packed.sources, packed.storages)
    assert found["name"] == "digits"
    found["images"][0] = 9.0
    assert data["images"][0] == 9.0
    assert kwargs["again"]["images"][0] == 9.0


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_shared_whatever_torchs_strategy_is(warm, strategy, monkeypatch):
    """Also on the second call, and if the function knows the tensor by itself."""

    def write(given, value):
        given[int(os.environ["RANK"])] = value
        data[2] = value
        return given.data_ptr() == data.data_ptr()

    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        data = torch.zeros(3)
        for value in (5.0, 6.0):
            assert warm.run(write, shared(data), value) == [True, True]
            assert data.tolist() == [value] * 3
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def test_cells_of_an_older_ipython(monkeypatch):
    shell = SimpleNamespace(compile=object())
    ipython = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert _cell_name("<ipython-input-5-0f1e2d3c4b5a>") == "Cell In[5]"
    assert _cell_name("module.py") is None


def test_shared_memory_by_accident_is_copied():
    """A batch from a loader's worker lies in shared memory; nobody asked to share."""
    tensor = torch.zeros(2).share_memory_()
    packed = pack_call(len, (tensor,), {})
    assert packed.storages == []


def test_code_keeps_its_name_and_source(monkeypatch):
    """A function typed at a prompt, where no file holds its source."""
    import linecache

    source = "def typed(x):\n    return x / 0\n"
    monkeypatch.setitem(
        linecache.cache, "<cell>", (0, None, source.splitlines(True), "")
    )
    namespace = {"__name__": "__main__"}
    exec(compile(source, "<cell>", "exec"), namespace)
    packed = pack_call(namespace["typed"], (1,), {})
    assert packed.sources == {"<cell>": source.splitlines(True)}
    fn, args, _ = unpack_call(packed.blob, packed.sources, [])
    assert fn.__code__.co_filename == "<cell>"
    with pytest.raises(ZeroDivisionError):
        fn(*args)


def make_closure():
    stream = (i for i in range(3))
    return lambda: stream


class Holder:
    def __init__(self, part):
        self.part = part

    def method(self):
        return self.part


def generator():
    return (i for i in range(3))


def uses_a_global():
    return LOCK


LOCK = threading.Lock()
NOWHERE = open(os.devnull, "w")  # noqa: SIM115


def count_classes(data):
    return torch.tensor(len(data.classes))  # cloudpickle takes it for torch.classes


def test_a_function_may_read_an_attribute_called_classes(monkeypatch):
    monkeypatch.setattr(count_classes, "__module__", "__main__")  # as in a notebook
    assert pack_call(count_classes, (), {})


@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [
        (lambda a, b: 0, (1, generator()), "`b` is a generator"),
        (lambda a: 0, ([1, {"k": generator()}],), "`a[1]['k']` is a generator"),
        (lambda a: 0, (Holder(generator()),), "`a.part` is a generator"),
        (lambda a: 0, (Holder(Holder(LOCK)),), "`a.part.part` is a lock"),
        (make_closure(), (), "`stream` is a generator"),
        (functools.partial(len, generator()), (), ".args[0]` is a generator"),
        (Holder(generator()).method, (), "`method.__self__.part` is a generator"),
        (lambda f: 0, (NOWHERE,), "`f` is an open file"),
    ],
)
def test_the_culprit_is_named(fn, args, message):
    with pytest.raises(NotSendable) as caught:
        pack_call(fn, args, {})
    assert message in str(caught.value)
    assert str(caught.value).endswith("build it inside the function, on each rank")


def test_a_global_that_a_function_uses_is_named(monkeypatch):
    monkeypatch.setattr(uses_a_global, "__module__", "__main__")  # as in a notebook
    with pytest.raises(NotSendable, match="`LOCK` is a lock"):
        pack_call(uses_a_global, (), {})


def test_what_we_cannot_name_keeps_pythons_reason():
    class Stubborn:
        def __reduce__(self):
            raise pickle.PicklingError("no way")

    with pytest.raises(NotSendable, match=r"`x` is a Stubborn \(no way\)"):
        pack_call(lambda x: 0, (Stubborn(),), {})


def test_sparse_tensors_leave_no_note_for_the_next_torch_load(tmp_path):
    """It would warn about them, whatever it loads; warnings are errors here."""
    torch.save({"weight": torch.ones(2)}, tmp_path / "file.pt")
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(unpack(pack(sparse)).to_dense(), torch.eye(3))
    state = torch.load(tmp_path / "file.pt", weights_only=True)
    assert state["weight"].tolist() == [1.0, 1.0]
