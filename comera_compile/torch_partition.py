"""How AOTAutograd cuts a joint graph into forward and backward: the interfaces of torch for it that are not public.

Checked against torch 2.11 to 2.13, as ``torch_private`` is; ``tests/test_saved_tensors.py`` is what fails first on a
new torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from comera_compile import torch_private
from comera_compile.errors import VersionError

Halves = tuple[fx.GraphModule, fx.GraphModule]
# Writes on the nodes of a joint graph what is saved and what is made again, given the number of the forward's outputs.
Tagger = Callable[[fx.GraphModule, int], object]
# Is shown each forward graph that was cut, with the number of its own outputs: what it saves comes after them.
Observer = Callable[[fx.GraphModule, int], None]

_FURTHER_VIEWS = {"_unsafe_view", "broadcast_in_dim"}  # views by what they do, though their schema may not say so


class Partitioner:
    """Cuts joint graphs as torch does, but after tags have said what is saved.

    A ``CustomPartitionerFn`` of Inductor, by registration, and a ``partition_fn`` of AOTAutograd.

    Args:
        key: text that stands for everything that the tags depend on; part of the key of Inductor's disk cache.
        tag: writes the tags; raises a ``ComeraError`` where it cannot.
        observe: is shown every forward graph before it is lowered; plays no part in the key.
    """

    def __init__(self, key: str, tag: Tagger, observe: Observer | None = None) -> None:
        self.key, self.tag, self.observe = key, tag, observe

    def __call__(self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **settings: Any) -> Halves:
        """Forward and backward graph of a joint graph."""
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        merge_equal_nodes(joint)
        self.tag(joint, num_fwd_outputs)
        halves: Halves = min_cut_rematerialization_partition(
            joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **settings
        )
        if self.observe is not None:
            self.observe(halves[0], num_fwd_outputs)
        return halves

    def uuid(self) -> str:
        """Part of the key of Inductor's disk cache."""
        return self.key

    def __reduce__(self) -> Any:
        # Inductor also pickles its whole configuration into that key: nothing but the key may count.
        return str, (self.key,)


def can_partition() -> bool:
    """Whether this torch lets a backend of its own choose where Inductor cuts a graph."""
    from torch._inductor import config, custom_graph_pass  # heavy; only when it is what runs

    return hasattr(custom_graph_pass, "CustomPartitionerFn") and hasattr(config, "custom_partitioner_fn")


def partitioner_patch(partitioner: Partitioner) -> dict[str, Partitioner]:
    """Inductor config patch that makes it cut graphs with a partitioner.

    Raises:
        VersionError: this torch has no such option.
    """
    if not can_partition():
        raise VersionError(
            f"torch {torch.__version__} does not let a backend choose what is saved for the backward: leave out "
            "saved='min' and saved_bytes, or use torch.utils.checkpoint in the model"
        )
    from torch._inductor import custom_graph_pass

    custom_graph_pass.CustomPartitionerFn.register(Partitioner)
    return {"custom_partitioner_fn": partitioner}


def compile_eagerly(graph_module: fx.GraphModule, inputs: Any, partitioner: Partitioner) -> torch_private.Compiled:
    """What Dynamo's backend ``aot_eager`` does, with another cut."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    lower = aot_autograd(fw_compiler=boxed_nop, partition_fn=partitioner, keep_inference_input_mutations=True)
    compiled: torch_private.Compiled = lower(graph_module, inputs)
    return compiled


def merge_equal_nodes(joint: fx.GraphModule) -> None:
    """Drop what nothing reads and keep one of equal nodes, as torch does before it cuts: tags come after it."""
    from torch._functorch import config
    from torch._functorch.compile_utils import fx_graph_cse

    joint.graph.eliminate_dead_code()
    if config.cse:
        joint.graph = fx_graph_cse(joint.graph)
    joint.recompile()


@dataclass(frozen=True)
class Operator:
    """What the registry says about an operation.

    Args:
        namespace, name: ``aten`` and ``mm`` of ``aten.mm.default``.
        tags: ``torch.Tag`` values.
        is_view: the result shares the storage of the first argument.
        writes: it writes to an argument.
    """

    namespace: str
    name: str
    tags: tuple[torch.Tag, ...]
    is_view: bool
    writes: bool


def operator_of(node: fx.Node) -> Operator | None:
    """The registered operation that a node calls, or None."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    namespace, _, name = target._schema.name.partition("::")
    view = target.is_view or name in _FURTHER_VIEWS
    return Operator(namespace, name, tuple(target.tags), view, bool(target._schema.is_mutable))


def is_tangent(node: fx.Node) -> bool:
    """Whether a node is a gradient that comes in from outside."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def is_backward_write(node: fx.Node) -> bool:
    """Whether a node writes to something and belongs to the backward, even if it depends on no gradient."""
    where = node.meta.get("partitioner_tag")
    op = operator_of(node)
    return where == "must_be_in_backward" or (where == "is_backward" and op is not None and op.writes)


def written_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Inputs that the forward overwrites: what was made from one cannot be made from it again."""
    (output,) = graph.find_nodes(op="output")
    described = [getattr(d, "mutated_input", None) for d in (output.meta.get("desc") or ())]
    changed = [d for d in described if d is not None]
    placeholders = graph.find_nodes(op="placeholder")
    return {n for n in placeholders if n.meta.get("desc") in changed or any(_writes_to(u, n) for u in n.users)}


def _is_random_state(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and str(source.target) == "run_and_save_rng_state"


def is_view(node: fx.Node) -> bool:
    """Whether the result of a node shares the storage of its first argument."""
    op = operator_of(node)
    return op is not None and op.is_view


def storage_owners(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each operation the one whose storage its result lives in: itself, or what it is a view of.

    Views of inputs of the graph have none: they take nothing and are always there.
    """
    owners: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if not (is_view(node) or _is_part_of_views(node)):
            owners[node] = node
        elif isinstance(node.args[0], fx.Node) and node.args[0] in owners:
            owners[node] = owners[node.args[0]]
    return owners


def observed_as_inductor_cuts(observe: Observer) -> Callable[..., Halves]:
    """A ``partition_fn`` of AOTAutograd that cuts as Inductor does by itself and shows each forward graph."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def cut(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **settings: Any) -> Halves:
        halves: Halves = min_cut_rematerialization_partition(
            joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **settings
        )
        observe(halves[0], num_fwd_outputs)
        return halves

    return cut


def saved_storages(forward: fx.GraphModule, forward_outputs: int) -> list[fx.Node]:
    """Nodes whose storages a forward graph hands to its backward: unique, inputs of the graph left out.

    Not counted are states of random generators, some kilobytes, that torch adds where a model checkpoints operations
    that may draw numbers.

    Args:
        forward: a forward graph as AOTAutograd cuts it: its own outputs, then what is saved.
        forward_outputs: number of its own outputs.
    """
    owners = storage_owners(n for n in forward.graph.nodes if n.op == "call_function")
    (output,) = forward.graph.find_nodes(op="output")
    saved = dict.fromkeys(owners[n] for n in output.args[0][forward_outputs:] if n in owners)
    return [node for node in saved if not _is_random_state(node)]


def saved_bytes(forward: fx.GraphModule, forward_outputs: int) -> int:
    """Bytes of :func:`saved_storages`."""
    return sum(hinted_bytes(node.meta.get("val")) for node in saved_storages(forward, forward_outputs))


def hinted_bytes(value: object) -> int:
    """Bytes of a fake tensor (0 of anything else); a dynamic size counts with its hint."""
    if not isinstance(value, torch.Tensor):
        return 0
    return torch_private.size_hint(value.numel()) * value.dtype.itemsize


def _is_part_of_views(node: fx.Node) -> bool:
    """Whether a node is one result of an operation that cuts a tensor into views."""
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node) and is_view(node.args[0])


def _writes_to(node: fx.Node, target: fx.Node) -> bool:
    op = operator_of(node)
    return op is not None and op.writes and bool(node.args) and node.args[0] is target
