"""What eager code gets when it reads ``module.weight`` of a packed weight: the dense matrix, writes carried through.

A plain copy of the dense matrix would swallow ``nn.init.normal_(layer.weight)`` without a word. This subclass watches
the version counter of everything that shares its storage; after a write the matrix is put back into the cores, or, if
they cannot hold it, the write is refused and the cores stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from comera_compile.errors import WeightError
from comera_compile.tt.encode import encode
from comera_compile.tt.marker import decode, tt_weight

WRITE_ERROR = 1e-2
_DATA_SET = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_FLAG_SET = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]


def dense_view(packed: torch.Tensor, layout: str) -> torch.Tensor:
    """Dense ``(rows, cols)`` matrix of ``packed`` with its autograd history; writes to it reach ``packed`` or raise."""
    view: DenseView = tt_weight(packed, layout).as_subclass(DenseView)
    view._link = _Link(packed, layout, view)
    return view


class _Link:
    """The packed vector behind a dense matrix and everything that shares storage with it."""

    def __init__(self, packed: torch.Tensor, layout: str, matrix: torch.Tensor) -> None:
        self.packed = packed
        self.layout = layout
        with torch._C.DisableTorchFunctionSubclass():
            self.matrix = matrix.detach().as_subclass(torch.Tensor)

    def write_back(self, matrix: torch.Tensor) -> None:
        """Put ``matrix`` into the cores at their present modes, ranks and scale."""
        shape = decode(self.layout)
        if matrix.shape != (shape.rows, shape.cols):
            raise WeightError(f"expected a {shape.rows}x{shape.cols} matrix, got {tuple(matrix.shape)}")
        with torch.no_grad():
            encoded = encode(matrix.detach().to(self.packed), shape, init="auto", max_error=WRITE_ERROR)
            if encoded.packed is None:
                raise WeightError(
                    f"an in-place write to a tensor-train weight ({self.layout}) does not fit its ranks: "
                    f"{encoded.reason}. Nothing was changed. Call comera.densify(model) first, or write to the packed "
                    "parameter itself (module._parameters)"
                )
            self.packed.copy_(encoded.packed * (encoded.shape.scale / shape.scale))


class DenseView(torch.Tensor):
    """A dense matrix that knows the packed vector it came from."""

    _link: _Link

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation on the dense matrix, keep track of views of it, and carry writes through."""
        kwargs = kwargs or {}
        views = list(_views((args, kwargs)))
        if views and func in (_DATA_SET, _FLAG_SET, torch.Tensor.requires_grad_):
            return _set(func, views[0], args[1:], kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            before = [view._version for view in views]
            result = func(*args, **kwargs)
            written = [v for v, version in zip(views, before, strict=True) if v._version != version]
            if torch.is_grad_enabled() and any(v.requires_grad for v in written):
                raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        for link in {id(v._link): v._link for v in written}.values():
            link.write_back(link.matrix)
        return _linked(result, views)


def _set(func: Callable[..., Any], view: DenseView, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``weight.data = ...`` and ``weight.requires_grad = ...``, which no version counter shows."""
    link = view._link
    if func is _DATA_SET:
        with torch._C.DisableTorchFunctionSubclass():
            link.write_back(args[0])
            return None
    link.packed.requires_grad_(*args, **kwargs)
    return None if func is _FLAG_SET else view


def _views(values: Any) -> Iterator[DenseView]:
    if isinstance(values, DenseView):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _views(value)
    elif isinstance(values, dict):
        yield from _views(list(values.values()))


def _linked(result: Any, views: Sequence[DenseView]) -> Any:
    """Results that share storage with a dense matrix become views of it, so that writes to them are seen too."""
    if isinstance(result, (tuple, list)) and not isinstance(result, torch.Size):
        linked = [_linked(r, views) for r in result]
        return linked if isinstance(result, list) else _rebuild(result, linked)
    if not isinstance(result, torch.Tensor) or isinstance(result, DenseView) or result.layout != torch.strided:
        return result
    with torch._C.DisableTorchFunctionSubclass():
        address = result.untyped_storage().data_ptr()
        for view in views:
            if result.device.type != "meta" and address and view.untyped_storage().data_ptr() == address:
                linked_view: DenseView = result.as_subclass(DenseView)
                linked_view._link = view._link
                return linked_view
    return result


def _rebuild(original: tuple[Any, ...], values: list[Any]) -> tuple[Any, ...]:
    """The same kind of tuple: torch returns named results (``torch.return_types``) from some operations."""
    return tuple(values) if type(original) is tuple else type(original)(values)
