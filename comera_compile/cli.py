"""The command ``comera``: measure this device and its plans, and look at what is kept on disk."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from comera_compile import user_cache
from comera_compile.autotune import tune_sizes
from comera_compile.calibrate import DTYPES, calibrate, calibration_key
from comera_compile.errors import ComeraError, OptionError
from comera_compile.planning.device_model import DeviceModel


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        Exit code: 0 done, 1 not done (the reason is on standard error). A wrong command line ends with 2.
    """
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (ComeraError, OSError) as error:
        print(f"comera {options.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="comera", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_calibrate(commands)
    _add_tune(commands)
    _add_cache(commands)
    return parser


def _add_calibrate(commands: Any) -> None:
    about = "measure matrix products and copies on this device; plans then go by these figures"
    p = commands.add_parser("calibrate", help=about, description=about)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--threads", type=int, help="threads of the CPU; default: as many as torch uses")
    p.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    p.add_argument("--seconds", type=float, default=20.0, help="about how long to measure, 1 to 30 (default 20)")
    p.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    p.set_defaults(run=_calibrate)


def _add_tune(commands: Any) -> None:
    about = "measure the best few plans of layers given by their sizes; models with such layers then use the winners"
    p = commands.add_parser("tune", help=about, description=about)
    p.add_argument("--layer", nargs="+", required=True, metavar="INxOUT", help="in and out features, as in 768x3072")
    p.add_argument("--rows", type=int, nargs="+", required=True, help="batch times sequence, one or more")
    p.add_argument("--rank", type=int, default=32, help="as the option of the backend (default 32)")
    p.add_argument("--order", type=int, default=3, help="as the option of the backend (default 3)")
    p.add_argument("--conv1d", action="store_true", help="weights stored as (in, out): GPT-2's Conv1D")
    p.add_argument("--inference", action="store_true", help="the forward alone, without gradients")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--threads", type=int, help="threads of the CPU; default: as many as torch uses")
    p.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    p.set_defaults(run=_tune)


def _add_cache(commands: Any) -> None:
    about = "what is kept on disk: calibrations and tuned plans"
    p = commands.add_parser("cache", help=about, description=about)
    what = p.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="every entry (the default)")
    what.add_argument("--clear", action="store_true", help="delete every entry")
    what.add_argument("--path", action="store_true", help="the directory")
    p.set_defaults(run=_cache)


def _calibrate(options: argparse.Namespace) -> int:
    dtype = DTYPES[options.dtype]
    model = calibrate(options.device, options.threads, dtype, options.seconds)
    threads = options.threads or _threads()
    key = calibration_key(options.device, threads, dtype)
    stored = user_cache.load("calibration", key) is not None
    figures = _figures(model) | {"stored": stored, "key": key}
    if options.json:
        print(json.dumps(figures))
    else:
        print(model.source)
        print("\n".join(f"  {name:<28}{value:>12.4g}" for name, value in _figures(model).items()))
        print(f"stored in {user_cache.directory()}" if stored else "NOT stored: it is lost when this process ends")
    return 0 if stored else 1


def _tune(options: argparse.Namespace) -> int:
    tuning = tune_sizes(
        [_sizes(text) for text in options.layer],
        options.rows,
        rank=options.rank,
        order=options.order,
        conv1d=options.conv1d,
        training=not options.inference,
        device=options.device,
        threads=options.threads,
        dtype=DTYPES[options.dtype],
    )
    print(tuning)
    return 0 if tuning.stored else 1


def _sizes(text: str) -> tuple[int, int]:
    inner, times, outer = text.partition("x")
    if not (times and inner.isdecimal() and outer.isdecimal() and int(inner) and int(outer)):
        raise OptionError(f"--layer must be in and out features such as 768x3072, got {text!r}")
    return int(inner), int(outer)


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _figures(model: DeviceModel) -> dict[str, float]:
    """What a reader compares: peak, the products of a tensor train of bond 32, bandwidth, floors."""

    def rate(m: int, n: int, k: int, *transposed: bool) -> float:
        return 2 * m * n * k / model.product_seconds(1, m, n, k, 4, *transposed) / 1e9

    return {
        "peak_gflops": model.flops_per_second / 1e9,
        "x_by_half_gflops": rate(512, 32, 768, False, True),
        "h_by_half_gflops": rate(512, 768, 32),
        "h_t_by_gradient_gflops": rate(32, 768, 512, True),
        "gradient_t_by_h_gflops": rate(768, 32, 512, True),
        "stream_gb_s": model.bytes_per_second / 1e9,
        "permuting_copy_gb_s": 2 * (1 << 22) / model.copy_seconds(1 << 22) / 1e9,
        "launch_us": model.launch_seconds * 1e6,
        "batched_matrix_us": model.batch_seconds * 1e6,
    }


def _cache(options: argparse.Namespace) -> int:
    if options.path:
        print(user_cache.directory() or f"no directory: set {user_cache.VARIABLE}")
    elif options.clear:
        print(f"{user_cache.clear()} entries deleted")
    else:
        found = user_cache.entries()
        for entry in found:
            print(f"{entry.namespace:<12} {entry.bytes:>9,} bytes  {entry.key or f'damaged: {entry.path}'}")
        print(f"{len(found)} entries in {user_cache.directory()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
