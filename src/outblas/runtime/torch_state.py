"""Places and functions of torch that the native table reads in C (``csrc/torch_state.h``).

A question to torch in Python costs 0.05 to 0.3 microseconds, and a call asks a dozen. The same answers stand in each
tensor, and come from C++ functions. Where they stand differs between versions of torch. So the places are searched for
in tensors of each kind. They count only if every tensor has its own answer there, and no other place has.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

#: Bytes of a TensorImpl that are searched; it has more.
_SEARCHED = 192
_WORD = 8
#: Kinds of tensors whose products torch must see.
_STRANGE = ("negated", "named")
#: Name in ``csrc/torch_state.h`` -> the library and the names that a function has had.
_FUNCTIONS = {
    "function_modes": ("libtorch_cpu.so", ("_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv",)),
    "dispatch_modes": ("libc10.so", ("_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv",)),
    "tracing": ("libtorch_cpu.so", ("_ZN5torch3jit6tracer15getTracingStateEv",)),
    "autocast": ("libtorch_cpu.so", ("_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE",)),
    "gradients": ("libc10.so", ("_ZN3c108GradMode10is_enabledEv",)),
    "bump_version": (
        "libtorch_cpu.so",
        tuple(f"_ZN5torch8autograd4impl12bump_versionERKN2at{of}E" for of in ("6Tensor", "10TensorBase")),
    ),
}
#: The same of ``describe``, which a torch may lack.
_DESCRIBE = ("libtorch_cpu.so", ("_ZN2at17toDLPackNonOwningERKNS_6TensorEP8DLTensor",))


def torch_state() -> dict[str, int] | None:
    """Return the numbers of ``csrc/torch_state.h``; None if this torch does not have them where they can be proved."""
    try:
        found = {**_places(), **{name: _address(*where) for name, where in _FUNCTIONS.items()}}
    except (AttributeError, LookupError, OSError, RuntimeError, TypeError):
        return None
    with contextlib.suppress(AttributeError):
        found["describe"] = _address(*_DESCRIBE)
    return found


def loaded_function(library: str, name: str) -> int:
    """Return the address of a function in a library that torch has loaded.

    Raises:
        AttributeError: it has no such function.
        OSError: the library is not loaded.
    """
    import torch

    loaded = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / library), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    return ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0


def _address(library: str, names: Iterable[str]) -> int:
    for name in names:
        try:
            return loaded_function(library, name)
        except AttributeError:
            continue
    raise AttributeError(f"{library} has none of {', '.join(names)}")


def _places() -> dict[str, int]:
    """Return where a tensor object has its at::Tensor, and that its dispatch keys and gradient.

    Raises:
        LookupError: a place is not found, or is not the only one.
    """
    import torch

    kinds = _tensors_of_each_kind()
    tensors = list(kinds.values())
    size = torch.Tensor.__basicsize__
    tensor = _only("an at::Tensor", _places_of(size, {id(t): t._cdata for t in tensors}))
    keys = _only("dispatch keys", _places_of(_SEARCHED, {t._cdata: _keys(t) for t in tensors}))
    gradient = _only("a gradient", _places_of_gradients())
    plain, versioned = _keys(kinds["plain"]), raw_key("ADInplaceOrView")
    strange = 0
    for name in ("negated", "named"):
        strange |= _keys(kinds[name]) & ~plain if name in kinds else 0
    for name, each in kinds.items():
        if bool(_keys(each) & versioned) == each.is_inference() or bool(_keys(each) & strange) != (name in _STRANGE):
            raise LookupError(f"the dispatch keys of a tensor that is {name} are unexpected")
    return {"tensor": tensor, "keys": keys, "gradient": gradient, "strange": strange, "versioned": versioned}


def _tensors_of_each_kind() -> dict[str, Any]:
    import torch

    with torch.inference_mode(False), torch.enable_grad():
        made = {
            "plain": torch.empty(2, 3, dtype=torch.float16, device="cpu"),
            "another": torch.empty(4, device="cpu"),
            "parameter": torch.nn.Parameter(torch.empty(3, device="cpu")),
            "fixed": torch.nn.Parameter(torch.empty(3, device="cpu"), requires_grad=False),
        }
        made["view"] = made["plain"].t()
        made["negated"] = torch._neg_view(torch.empty(4, device="cpu"))
        if hasattr(torch.Tensor, "has_names"):  # up to torch 2.12, which warns of them
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made["named"] = torch.empty(2, 3, device="cpu", names=("m", "k"))
    with torch.inference_mode():
        made["inference"] = torch.empty(2, device="cpu")
    return made


def _places_of(size: int, wanted: Mapping[int, int]) -> list[int]:
    """Return the offsets at which each address has its value.

    Args:
        size: bytes behind each address that are searched.
    """
    return [o for o in range(_WORD, size, _WORD) if all(_word(at + o) == value for at, value in wanted.items())]


def _places_of_gradients() -> list[int]:
    """Return the offsets at which a TensorImpl has 0, and something else once its tensor wants a gradient."""
    import torch

    found = list(range(_WORD, _SEARCHED, _WORD))
    for _ in range(2):
        tensor = torch.empty(5, device="cpu", requires_grad=False)
        empty = [offset for offset in found if not _word(tensor._cdata + offset)]
        tensor.requires_grad_()
        found = [offset for offset in empty if _word(tensor._cdata + offset)]
    return found


def _only(what: str, places: list[int]) -> int:
    """Return the only place; raise LookupError for no place or several."""
    if len(places) != 1:
        raise LookupError(f"{what} was found at {places or 'no offset'} in torch objects")
    return places[0]


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _keys(tensor: Any) -> int:
    import torch

    return int(torch._C._dispatch_keys(tensor).raw_repr())


def raw_key(name: str) -> int:
    """Return the raw set of dispatch keys that holds one key alone.

    Raises:
        RuntimeError: torch has no such key. An older torch may raise AttributeError or TypeError instead.
    """
    import torch

    return int(torch._C.DispatchKeySet(torch._C._parse_dispatch_key(name)).raw_repr())
