"""Run a traced graph as Inductor's generated code does, without its compiler: hundreds of graphs would wait for it.

Each operation of torch writes into a result that is allocated for it, operands are strided views of what is there,
memory is given back after its last use, and nothing else is in between: no autograd, no dispatch of the graph's views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

# Called as functions of torch, which takes half the time of a call through torch.ops.
_DIRECT = {torch.ops.aten.mm.default: torch.mm, torch.ops.aten.bmm.default: torch.bmm}


def replay(
    graph_module: fx.GraphModule, given: Sequence[torch.Tensor], constant: Sequence[object] = ()
) -> Callable[[], list[torch.Tensor]]:
    """A function that runs the graph on ``given``.

    Args:
        graph_module: aten calls, as ``make_fx`` traces them.
        given: tensors for the inputs, in order.
        constant: operations that are done now, once, and whose results every run reads.

    Raises:
        ValueError: an operation has no variant that writes into given memory.
    """
    writer = _Writer(constant)
    inputs = iter(given)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            writer.fix(node, next(inputs))
        elif node.op == "call_function":
            writer.call(node)
    [output] = graph_module.graph.find_nodes(op="output")
    return writer.compile(output)


class _Writer:
    """Lines of code, written while the graph runs once on real tensors."""

    def __init__(self, constant: Sequence[object]) -> None:
        self.constant = constant
        self.names: dict[str, Any] = {"empty": torch.empty_strided, "view": torch.as_strided}
        self.lines: list[tuple[str, set[str]]] = []
        self.values: dict[fx.Node, Any] = {}
        self.owner: dict[int, tuple[str, torch.Tensor]] = {}  # memory, the name of what it is and the tensor

    def fix(self, node: fx.Node, value: Any) -> None:
        """A value that exists before the run."""
        self.values[node] = value
        for tensor in value if isinstance(value, (tuple, list)) else [value]:
            if self._memory(tensor) not in self.owner:
                self.owner[self._memory(tensor)] = (name := f"g{len(self.names)}"), tensor
                self.names[name] = tensor

    def call(self, node: fx.Node) -> None:
        """A view, which costs nothing until it is used, or an operation."""
        assert callable(node.target)
        value = node.target(*fx.map_arg(node.args, self.values.get), **fx.map_arg(node.kwargs, self.values.get))
        tensors = value if isinstance(value, (tuple, list)) else [value]
        if node.target in self.constant:
            self.fix(node, value)
        elif all(self._memory(tensor) in self.owner for tensor in tensors):
            self.values[node] = value
        else:
            self._write(node, value)

    def _write(self, node: fx.Node, value: Any) -> None:
        if getattr(node.target, "namespace", "") == "comera":
            self._call_own(node, value)
            return
        packet = getattr(node.target, "overloadpacket", None)
        run = _DIRECT.get(node.target) or getattr(packet, "out", None)  # type: ignore[call-overload]
        if run is None or not isinstance(value, torch.Tensor):
            raise ValueError(f"expected an operation that can write into given memory, got {node.format_node()}")
        used: set[str] = set()
        name, function = f"b{len(self.lines)}", f"f{len(self.lines)}"
        arguments = [self._text(a, used) for a in node.args]
        arguments += [f"{key}={self._text(a, used)}" for key, a in node.kwargs.items()]
        kind = f"dtype={self._text(value.dtype, used)}"
        if value.device.type != "cpu":
            kind += f", device={self._text(value.device, used)}"
        line = f"{name} = empty({tuple(value.shape)}, {value.stride()}, {kind})\n"
        self.names[function] = run
        self.lines.append((f"{line}    {function}({', '.join(arguments)}, out={name})", used))
        self.values[node] = value
        self.owner[self._memory(value)] = name, value

    def _call_own(self, node: fx.Node, value: Any) -> None:
        """An operator of this package: it makes the memory of its results, of which there may be several."""
        used: set[str] = set()
        name, function = f"b{len(self.lines)}", f"f{len(self.lines)}"
        self.names[function] = node.target
        self.lines.append((f"{name} = {function}({', '.join(self._text(a, used) for a in node.args)})", used))
        self.values[node] = value
        results = (
            [(name, value)] if isinstance(value, torch.Tensor) else [(f"{name}[{k}]", v) for k, v in enumerate(value)]
        )
        for place, tensor in results:
            self.owner[self._memory(tensor)] = place, tensor

    def _text(self, argument: Any, used: set[str]) -> str:
        if isinstance(argument, fx.Node):
            value = self.values[argument]
            name, base = self.owner[self._memory(value)]
            used.add(name.split("[")[0])
            layout = tuple(value.shape), value.stride(), value.storage_offset()
            is_base = layout == (tuple(base.shape), base.stride(), base.storage_offset())
            return name if is_base else f"view({name}, {', '.join(map(str, layout))})"
        if isinstance(argument, (tuple, list)):
            return f"[{', '.join(self._text(a, used) for a in argument)}]"
        if argument is None or isinstance(argument, (bool, int, float, str)):
            return repr(argument)
        self.names[name := f"g{len(self.names)}"] = argument
        return name

    @staticmethod
    def _memory(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    def compile(self, output: fx.Node) -> Callable[[], list[torch.Tensor]]:
        """The lines as a function; what is not read again is deleted at once."""
        later: set[str] = set()
        text = ["def run():", f"    return {self._text(output.args[0], later)}"]
        for line, used in reversed(self.lines):
            made = line.split(" ", 1)[0]
            dead = sorted(name for name in used - later if name.startswith("b"))
            dead += [] if made in later else [made]
            later |= used
            text.insert(1, f"    {line}\n    del {', '.join(dead)}" if dead else f"    {line}")
        exec("\n".join(text), self.names)
        run: Callable[[], list[torch.Tensor]] = self.names["run"]
        return run
