"""What eager code gets when it reads ``module.weight`` of a packed weight: the dense matrix, writes carried through.

A plain copy of the dense matrix would swallow ``nn.init.normal_(layer.weight)`` without a word. This subclass watches
the version counter of everything that shares its storage; after a write the matrix is put back into the cores, or, if
they cannot hold it, the write is refused and the cores stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from comera_compile import torch_private
from comera_compile.errors import WeightError
from comera_compile.tt.align import align
from comera_compile.tt.encode import encode
from comera_compile.tt.marker import decode
from comera_compile.tt.packing import to_dense

WRITE_ERROR = 1e-2
# As they end: torch.nn.init has ``kaiming_uniform_`` and others.
_RANDOM_FILLS = ("normal_", "uniform_", "exponential_", "cauchy_", "geometric_", "bernoulli_", "random_")
_DATA_SET = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_FLAG_SET = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]


def dense_view(packed: torch.Tensor, layout: str) -> torch.Tensor:
    """Dense ``(rows, cols)`` matrix of ``packed`` with its autograd history; writes to it reach ``packed`` or raise.

    Not by the marker op: made of plain operations it can be differentiated twice and under ``torch.func``.
    """
    if torch_private.is_transformed(packed):
        return _rebuild(packed, layout)
    # Tensors made under inference_mode have no version that would tell about writes. Neither have views one of their
    # own, nor a history but that of what they are a view of.
    with torch_private.without_inference_mode():
        source = _rebuild(packed, layout)
        source = source.clone(memory_format=torch.contiguous_format) if source._is_view() else source.contiguous()
        view: DenseView = source.as_subclass(DenseView)
        view._link = _Link(packed, layout, source)
    return view


def _rebuild(packed: torch.Tensor, layout: str) -> torch.Tensor:
    with torch_private.without_autocast(packed.device.type):
        return to_dense(packed, decode(layout))


class _Link:
    """The packed vector behind a dense matrix and everything that shares storage with it."""

    def __init__(self, packed: torch.Tensor, layout: str, source: torch.Tensor) -> None:
        self.packed = packed
        self.layout = layout
        self.source = source
        self.matrix = source.detach()
        self.filled = False

    def note(self, func: Callable[..., Any], given: Sequence[Any]) -> None:
        """Whether the matrix stands for random numbers after a write: only then may others be drawn in their place.

        So it is after ``normal_`` and its like, and after what follows with numbers alone, as in a truncated normal.
        """
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        self.filled = func.__name__.endswith(_RANDOM_FILLS) or (self.filled and len(tensors) == 1)

    def write_back(self, matrix: torch.Tensor) -> None:
        """Put ``matrix`` into the cores at their present modes, ranks and scale."""
        shape = decode(self.layout)
        if matrix.shape != (shape.rows, shape.cols):
            raise WeightError(f"expected a {shape.rows}x{shape.cols} matrix, got {tuple(matrix.shape)}")
        with torch.no_grad():
            trained = "" if self.filled else "written"
            found = matrix.detach().to(self.packed)
            encoded = encode(found, shape, init="auto", max_error=WRITE_ERROR, trained=trained)
            if encoded.packed is None:
                raise WeightError(
                    f"an in-place write to a tensor-train weight ({self.layout}) does not fit its ranks: "
                    f"{encoded.reason}. Nothing was changed. Call comera.densify(model) first, or write to the packed "
                    "parameter itself (module._parameters)"
                )
            cores = encoded.packed * (encoded.shape.scale / shape.scale)
            # After a small write the optimizer's moments, and averages of the cores, still fit.
            aligned = align(cores, self.packed, shape) if encoded.method == "svd" else None
            self.packed.copy_(cores if aligned is None else aligned)


class DenseView(torch.Tensor):
    """A dense matrix that knows the packed vector it came from."""

    _link: _Link
    _derived = False  # whether it is a view of what ``module.weight`` gave

    @property
    def _is_param(self) -> bool:
        """Whether ``isinstance(weight, nn.Parameter)``: what ``module.weight`` gives is one for whoever asks."""
        return not self._derived

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        # nn.Parameter(weight) marks what it has made: an independent dense parameter from then on.
        self.__dict__.clear()
        self.__class__ = nn.Parameter  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as the plain tensor it is."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A dense parameter of its own, as a copy of ``layer.weight`` always was."""
        with torch._C.DisableTorchFunctionSubclass():
            copied = nn.Parameter(self.detach().as_subclass(torch.Tensor).clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

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
        if torch.compiler.is_compiling():  # a dense matrix given to compiled code is a plain tensor there
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        views = list(_views((args, kwargs)))
        if views and func == _DATA_SET:
            return _set_data(views[0], args[1])
        if views and func in (_FLAG_SET, torch.Tensor.requires_grad_) and not views[0]._derived:
            views[0]._link.packed.requires_grad_(*args[1:], **kwargs)
            return None if func == _FLAG_SET else views[0]
        with torch._C.DisableTorchFunctionSubclass():
            before = [(view._version, view._link.source.grad_fn) for view in views]
            result = func(*args, **kwargs)
            changed = [(v, node) for v, (version, node) in zip(views, before, strict=True) if v._version != version]
            written = [v for v, _ in changed]
            # The functions of nn.init set their own grad mode: whether autograd saw the write shows in its record only.
            if any(v._link.source.grad_fn is not node for v, node in changed):
                raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        for link in {id(v._link): v._link for v in written}.values():
            link.note(func, [*args, *kwargs.values()])
            link.write_back(link.matrix)
        return _linked(result, views)


def _set_data(view: DenseView, data: torch.Tensor) -> None:
    """``weight.data = ...``, which no version counter shows."""
    with torch._C.DisableTorchFunctionSubclass():
        view._link.filled = False
        view._link.write_back(data)


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
        return linked if isinstance(result, list) else _like(result, linked)
    if not isinstance(result, torch.Tensor) or isinstance(result, DenseView) or result.layout != torch.strided:
        return result
    if torch_private.is_transformed(result):  # inside of vmap, grad and their like there is no storage to be asked for
        return result
    with torch._C.DisableTorchFunctionSubclass():
        address = result.untyped_storage().data_ptr()
        for view in views:
            if result.device.type != "meta" and address and view.untyped_storage().data_ptr() == address:
                linked_view: DenseView = result.as_subclass(DenseView)
                linked_view._link, linked_view._derived = view._link, True
                return linked_view
    return result


def _like(original: tuple[Any, ...], values: list[Any]) -> tuple[Any, ...]:
    """The same kind of tuple: torch returns named results (``torch.return_types``) from some operations."""
    return tuple(values) if type(original) is tuple else type(original)(values)
