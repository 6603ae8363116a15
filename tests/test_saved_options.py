"""The options that say what is saved for the backward, and the disk cache's key for them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import comera_compile as comera
from comera_compile import torch_partition
from comera_compile.backend import partitioner_for
from comera_compile.options import Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"saved": "some"}, r"saved must be one of 'auto', 'all', 'min', got 'some'"),
        ({"saved": None}, "saved must be one of"),
        ({"saved_bytes": "2GB"}, r"saved_bytes must be a number of bytes, an int .* 500 MiB; got '2GB'"),
        ({"saved_bytes": "100MB"}, r"saved_bytes must be a number of bytes, an int of at least 0, .*; got '100MB'"),
        ({"saved_bytes": 1.5}, r"saved_bytes must be a number of bytes, an int .*500 \* 2\*\*20 for 500 MiB; got 1\.5"),
        ({"saved_bytes": 2e9}, "saved_bytes must be a number of bytes, an int"),
        ({"saved_bytes": -1}, "saved_bytes must be .* an int of at least 0, .*got -1"),
        ({"saved_bytes": True}, "saved_bytes must be a number of bytes"),
        ({"saved": "all", "saved_bytes": 1}, "exclude each other"),
        ({"saved": "min", "inner": "eager"}, "saved='min' needs inner 'inductor' or 'aot_eager', got 'eager'"),
        ({"saved_bytes": 1, "inner": "eager"}, "saved_bytes needs inner"),
        ({"saved": "min", "inner_options": {"custom_partitioner_fn": None}}, "custom_partitioner_fn"),
    ],
)
def test_impossible_options_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(comera.OptionError, match=message):
        comera.Backend(**options)


def test_the_disk_cache_tells_choices_apart() -> None:
    # Inductor puts uuid() and the pickled configuration into its key: equal for equal options, else different.
    options: list[dict[str, Any]] = [{}, {"saved": "min"}, {"saved_bytes": 5}, {"saved_bytes": 6}]
    first, second = ([partitioner_for(Options(**o)) for o in options] for _ in range(2))
    keys = [[(p.uuid(), pickle.dumps(p)) for p in made if p is not None] for made in (first, second)]
    assert len(set(keys[0])) == 4 and keys[0] == keys[1]


@pytest.mark.parametrize(
    "options", [{"saved": "all"}, {"inner": "eager"}, {"inner_options": {"custom_partitioner_fn": None}}]
)
def test_others_decide(options: dict[str, Any]) -> None:
    # Inductor as it is; an inner compiler that cuts nothing; a partitioner of the user's.
    assert partitioner_for(Options(**options)) is None


def test_a_torch_without_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import custom_graph_pass

    monkeypatch.delattr(custom_graph_pass, "CustomPartitionerFn")
    partitioner = partitioner_for(Options(saved="min"))
    assert partitioner is not None
    with pytest.raises(comera.VersionError, match="leave out saved='min' and saved_bytes"):
        torch_partition.partitioner_patch(partitioner)
    assert partitioner_for(Options()) is None  # the default is what Inductor does then
