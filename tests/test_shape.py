"""What a packed vector means: sizes, encodings, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from comera_compile.errors import ShapeError
from comera_compile.tt.shape import TTShape

LINEAR = TTShape("tt", 768, 3072, (12, 8, 8), (12, 16, 16), (1, 12, 30, 30, 30, 16, 1), 0.1 + 0.2, -1)
EMBEDDING = TTShape("ttm", 30522, 768, (16, 20, 10, 10), (4, 4, 8, 6), (1, 32, 32, 32, 1), 2.0**-0.25, 5)


def test_sizes_of_a_linear_weight() -> None:
    assert LINEAR.modes == (12, 8, 8, 12, 16, 16)
    assert LINEAR.core_shapes[1] == (12, 8, 30)
    # 1*12*12 + 12*8*30 + 30*8*30 + 30*12*30 + 30*16*16 + 16*16*1, by hand.
    assert LINEAR.core_sizes == (144, 2880, 7200, 10800, 7680, 256)
    assert LINEAR.numel == 28960
    assert LINEAR.bond == 30
    assert LINEAR.dense_numel == 768 * 3072
    assert not LINEAR.padded


def test_sizes_of_an_embedding() -> None:
    assert EMBEDDING.modes == (64, 80, 80, 60)
    assert EMBEDDING.core_shapes[3] == (32, 10, 6, 1)
    assert EMBEDDING.numel == 64 * 32 + 2 * 32 * 80 * 32 + 32 * 60
    assert EMBEDDING.padded  # 32000 rows stand for 30522


@pytest.mark.parametrize("shape", [LINEAR, EMBEDDING])
def test_text_and_layout_keep_everything(shape: TTShape) -> None:
    # The scale is no short decimal number: both ways keep all its bits.
    assert TTShape.decode(shape.encode()) == shape
    assert TTShape.from_tensor(shape.to_tensor()) == shape
    assert shape.to_tensor().dtype == torch.int64


def test_layout_of_another_version_is_refused() -> None:
    layout = LINEAR.to_tensor()
    layout[0] += 1
    with pytest.raises(ShapeError, match="layout version"):
        TTShape.from_tensor(layout)
    layout = LINEAR.to_tensor()
    layout[1] = 7
    with pytest.raises(ShapeError, match="format number 7"):
        TTShape.from_tensor(layout)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_modes": (12, 8, 7)}, "row_modes"),  # 672 < 768
        ({"col_modes": ()}, "col_modes"),
        ({"ranks": (1, 12, 30, 30, 30, 16)}, "length 7"),
        ({"ranks": (2, 12, 30, 30, 30, 16, 1)}, "begin and end with 1"),
        ({"ranks": (1, 12, 0, 30, 30, 16, 1)}, "positive"),
        ({"format": "cp"}, "format"),
        ({"format": "ttm", "col_modes": (48, 64)}, "as many row modes"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        replace(LINEAR, **change)  # type: ignore[arg-type]


def test_scale_alone_changes() -> None:
    assert replace(LINEAR.with_scale(0.5), scale=LINEAR.scale) == LINEAR
