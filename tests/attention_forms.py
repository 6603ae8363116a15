"""Attention blocks in the forms in which models write them: those that run from bond to bond, and those that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, DIM, BATCH, TOKENS = 32, 4, 8, 2, 6
Forward = Callable[["Block", Tensor], Tensor]
attend = F.scaled_dot_product_attention


class Block(nn.Module):
    """The layers of one attention block in all their usual forms, and what is done with them."""

    def __init__(self, between: Forward, *, bias: bool = True) -> None:
        super().__init__()
        self.between = between
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))
        self.joint, self.pair = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        self.few, self.fewer = (nn.Linear(WIDTH, WIDTH // 2, bias=bias) for _ in range(2))
        self.broad, self.broad_out = nn.Linear(WIDTH, 2 * WIDTH, bias=bias), nn.Linear(2 * WIDTH, WIDTH, bias=bias)
        self.narrow_out = nn.Linear(WIDTH // 2, WIDTH, bias=bias)
        self.mask = nn.Parameter(torch.randn(TOKENS, TOKENS))
        self.calls = nn.Buffer(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self, x)

    def parts(self, x: Tensor) -> list[Tensor]:
        return [heads(layer(x)) for layer in (self.query, self.key, self.value)]


def heads(wide: Tensor, count: int = HEADS) -> Tensor:
    """``[batch, tokens, columns]`` to ``[batch, heads, tokens, dim]``."""
    batch, tokens, columns = wide.shape
    return wide.view(batch, tokens, count, columns // count).transpose(1, 2)


def side_by_side(mixed: Tensor) -> Tensor:
    return mixed.transpose(1, 2).flatten(2)


def plain(m: Block, x: Tensor, **settings: Any) -> Tensor:
    batch, tokens, width = x.shape
    return m.out(attend(*m.parts(x), **settings).transpose(1, 2).reshape(batch, tokens, width))


def by_permute(m: Block, x: Tensor) -> Tensor:
    q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).permute(0, 2, 1, 3) for layer in (m.query, m.key, m.value))
    return m.out(attend(q, k, v).permute(0, 2, 1, 3).contiguous().view(BATCH, TOKENS, WIDTH))


def as_transformers_do(m: Block, x: Tensor) -> Tensor:
    q, k, v = (layer(x).view(*x.shape[:-1], -1, DIM).transpose(1, 2) for layer in (m.query, m.key, m.value))
    mixed = attend(q, k, v)
    mixed = mixed.reshape(mixed.shape[0], -1, x.shape[1], DIM).transpose(1, 2).contiguous()
    return m.out(mixed.reshape(*x.shape[:-1], -1).contiguous())


def of_two_axes(m: Block, x: Tensor) -> Tensor:
    def layer(of: nn.Linear, x: Tensor) -> Tensor:
        return torch.addmm(of.bias, x.view(-1, x.shape[-1]), of.weight.t())

    q, k, v = layer(m.joint, x).view(*x.shape[:-1], 3 * WIDTH).split(WIDTH, dim=2)
    mixed = side_by_side(attend(heads(q), heads(k), heads(v), is_causal=True))
    return (layer(m.out, mixed) + x.view(-1, WIDTH)).view(x.shape)


def grouped(m: Block, x: Tensor) -> Tensor:
    k, v = heads(m.few(x), 2), heads(m.fewer(x), 2)
    return m.out(side_by_side(attend(heads(m.query(x)), k, v, enable_gqa=True)))


def across(m: Block, x: Tensor) -> Tensor:
    memory = x[:, :4].cos()
    k, v = heads(m.key(memory)), heads(m.value(memory))
    return m.out(side_by_side(attend(heads(m.query(x)), k, v)))


def joint(m: Block, x: Tensor) -> Tensor:
    q, k, v = (heads(t) for t in m.joint(x).chunk(3, dim=-1))
    return m.out(side_by_side(attend(q, k, v, is_causal=True)))


def pair(m: Block, x: Tensor) -> Tensor:
    v, k = m.pair(x).split([WIDTH, WIDTH], dim=-1)
    return m.out(side_by_side(attend(heads(m.query(x)), heads(k), heads(v))))


def lower_left(x: Tensor) -> Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def closed(x: Tensor) -> Tensor:
    """A mask of numbers for each head of which one query sees nothing."""
    mask = x.detach()[:, :1, None, :TOKENS] * torch.arange(HEADS * TOKENS).view(1, HEADS, TOKENS, 1)
    return mask.index_fill(2, torch.tensor([2]), -torch.inf)


TAKEN: dict[str, Forward] = {
    "plain": plain,
    "causal": lambda m, x: plain(m, x, is_causal=True),
    "scaled": lambda m, x: plain(m, x, scale=0.7),
    "dropout that never drops": lambda m, x: plain(m, x, dropout_p=0.0),
    "residual": lambda m, x: x + plain(m, x),
    "by permute": by_permute,
    "as transformers do": as_transformers_do,
    "layers of two axes": of_two_axes,
    "grouped queries": grouped,
    "keys of other tokens": across,
    "one projection": joint,
    "keys and values of one projection": pair,
    "keys are the values": lambda m, x: plain_of(m, heads(m.query(x)), *[heads(m.key(x))] * 2),
    "a mask of truth values": lambda m, x: plain(m, x, attn_mask=lower_left(x)),
    "a mask of numbers": lambda m, x: plain(m, x, attn_mask=closed(x)),
    "a mask of keys": lambda m, x: plain(m, x, attn_mask=(x.detach()[:, :, :1] > 0).transpose(1, 2)[:, None]),
}


def written(m: Block, x: Tensor) -> Tensor:
    q = heads(m.query(x))
    m.calls.add_(1.0)
    return m.out(side_by_side(attend(q, heads(m.key(x)), heads(m.value(x))))) * m.calls


def without_gradient(m: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        q = heads(m.query(x))
    return m.out(side_by_side(attend(q, heads(m.key(x)), heads(m.value(x)))))


def seen_elsewhere(m: Block, x: Tensor) -> Tensor:
    q, k, v = m.parts(x)
    return plain_of(m, q, k, v) + v.sum()


def plain_of(m: Block, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return m.out(side_by_side(attend(q, k, v)))


def between_bonds_of_joint(m: Block, x: Tensor) -> Tensor:
    """The output projection is itself followed by a function and another layer."""
    return m.broad(side_by_side(attend(*m.parts(x))))


def mixed_seen(m: Block, x: Tensor) -> Tensor:
    mixed = attend(*m.parts(x))
    return m.out(side_by_side(mixed)) + mixed.sum()


def wide_values(m: Block, x: Tensor) -> Tensor:
    q, k, _ = m.parts(x)
    return m.broad_out(side_by_side(attend(q, k, heads(m.broad(x)))))


def one_part_seen(m: Block, x: Tensor) -> Tensor:
    q, k, v = m.joint(x).chunk(3, dim=-1)
    return plain_of(m, heads(q), heads(k), heads(v)) + v


LEFT: dict[str, Forward] = {
    "q is read twice": lambda m, x: plain_of(m, heads(q := m.query(x)), heads(m.key(x)), heads(m.value(x))) + q,
    "heads are read twice": seen_elsewhere,
    "one part of a projection is read twice": one_part_seen,
    "the mixed values are read twice": mixed_seen,
    "something is written to in between": written,
    "gradients are off for the first": without_gradient,
    "a mask that is trained": lambda m, x: plain(m, x, attn_mask=m.mask),
    "something is done with q": lambda m, x: plain_of(m, 0.5 * (p := m.parts(x))[0], *p[1:]),
    "something is done with the mixed values": lambda m, x: m.out(side_by_side(attend(*m.parts(x)).tanh())),
    "heads are not swapped back": lambda m, x: m.out(attend(*m.parts(x)).reshape(x.shape)),
    "heads are not swapped at all": lambda m, x: m.out(
        attend(*(layer(x).view(BATCH, HEADS, TOKENS, DIM) for layer in (m.query, m.key, m.value))).reshape(x.shape)
    ),
    "heads are shared out once more": lambda m, x: m.narrow_out(side_by_side(attend(*m.parts(x))).view(BATCH, -1, 16)),
    "half of the columns are tokens": lambda m, x: m.out(
        side_by_side(attend(*[m.broad(x).view(BATCH, -1, HEADS, DIM).transpose(1, 2)] * 3))
    ),
    "heads are swapped after they were mixed up": lambda m, x: m.out(
        attend(*m.parts(x)).reshape(BATCH, HEADS, DIM, TOKENS).transpose(1, 2).reshape(x.shape)
    ),
    "swapped twice": lambda m, x: plain_of(m, (p := m.parts(x))[0].transpose(1, 2).transpose(2, 1), *p[1:]),
    "slices of a projection": lambda m, x: plain_of(
        m, *(heads(m.joint(x)[..., k : k + WIDTH]) for k in (0, WIDTH, 2 * WIDTH))
    ),
    "a projection by its parts": lambda m, x: plain_of(
        m, *(heads(t) for t in m.joint(x).unflatten(-1, (3, WIDTH)).unbind(-2))
    ),
    "three tokens": lambda m, x: plain(m, x[:, :3]),
    "values of another width": wide_values,
    "heads of keys are broadcast": lambda m, x: plain_of(
        m, heads(m.query(x)), *(heads(f(x), 2)[:, :1].expand(-1, HEADS, -1, -1) for f in (m.few, m.fewer))
    ),
    "attention of three axes": lambda m, x: m.out(attend(m.query(x), m.key(x), m.value(x))),
    "attention of two axes": lambda m, x: m.out(attend(m.query(x[0]), m.key(x[0]), m.value(x[0]))),
    "attention of five axes": lambda m, x: m.out(side_by_side(attend(*(p[None] for p in m.parts(x)))[0])),
    "narrow heads": lambda m, x: m.out(
        side_by_side(attend(*(heads(f(x), 2 * HEADS) for f in (m.query, m.key, m.value))))
    ),
    "tokens in front": lambda m, x: m.out(
        attend(*(f(x).view(BATCH, TOKENS * HEADS, DIM).transpose(0, 1)[None] for f in (m.query, m.key, m.value)))
        .squeeze(0)
        .transpose(0, 1)
        .reshape(x.shape)
    ),
    "the projection begins a bridge": lambda m, x: m.broad_out(F.gelu(between_bonds_of_joint(m, x))),
}
