"""The matrix products of the C++ kernels against float64, with operands of every kind inside larger buffers."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from comera_compile.codegen import cpu
from comera_compile.cpp_library import load_library

GEMM = (Path(cpu.__file__).parent / "gemm.h").read_text()
CALLS = """
#define PRODUCT(NAME, T)                                                                                            \\
  extern "C" void NAME(const int64_t* n, const T* a, const T* b, T* c, bool add) {                                  \\
    comera::gemm<T>(n[0], n[1], n[2], comera::Left<T>{a, n[3], n[4]}, b, n[5], c, n[6], add);                       \\
  }
PRODUCT(product_float, float)
PRODUCT(product_double, double)
extern "C" void by_panels(const int64_t* n, const float* a, const float* const* b, float* const* c, bool add) {
  comera::panels<float>(n[0], n[1], n[2], comera::Left<float>{a, n[3], n[4]}, b, n[5], c, n[6], add);
}
extern "C" int64_t width() { return comera::WIDTH<float>; }
"""


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    made = load_library(GEMM, CALLS)
    if made is None:
        pytest.fail("the C++ kernels could not be built: these tests need a C++ compiler, as the README says")
    return made


def words(*values: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_product(library: ctypes.CDLL, dtype: torch.dtype, add: bool, transposed: bool) -> None:
    run, tolerance = (library.product_float, 1e-6) if dtype == torch.float32 else (library.product_double, 1e-15)
    for rows in (*range(1, 15), 30, 49, 97):
        for columns in (1, 3, 7, 8, 15, 16, 17, 31, 32, 40, 75):
            for terms in (0, 1, 5, 64, 130):
                a = torch.randn(terms, rows, dtype=dtype).t() if transposed else torch.randn(rows, terms, dtype=dtype)
                b = torch.randn(terms, columns + 3, dtype=dtype)
                c = torch.randn(rows + 2, columns + 5, dtype=dtype)
                right = c.clone()
                right[1:-1, 2:-3] = a @ b[:, 2:-1] + (right[1:-1, 2:-3] if add else 0)
                sizes = words(rows, columns, terms, a.stride(0), a.stride(1), b.stride(0), c.stride(0))
                at = [t.data_ptr() for t in (a, b[:, 2:], c[1:, 2:])]
                run(sizes, *(ctypes.c_void_p(p) for p in at), ctypes.c_bool(add))
                # nothing beside the product is written
                assert (c - right).abs().max() <= tolerance * 40, (rows, columns, terms)
                c[1:-1, 2:-3] = right[1:-1, 2:-3]
                assert torch.equal(c, right), (rows, columns, terms)


@pytest.mark.parametrize("add", [False, True])
def test_panels_may_lie_anywhere(library: ctypes.CDLL, add: bool) -> None:
    width = library.width()
    for count in range(1, 8):
        a = torch.randn(13, 9)
        b, c = torch.randn(count, 9, width), torch.randn(count, 13, width)
        right = a @ b + (c if add else 0)
        order = torch.randperm(count).tolist()
        pointers = [(ctypes.c_void_p * count)(*(t[k].data_ptr() for k in order)) for t in (b, c)]
        sizes = words(13, count, 9, 9, 1, width, width)
        library.by_panels(sizes, ctypes.c_void_p(a.data_ptr()), *pointers, ctypes.c_bool(add))
        torch.testing.assert_close(c, right)
