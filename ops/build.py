"""Builds the CUDA library ahead of time with nvcc; needs no PyTorch."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from shardlight.ops.built import OpError, cuda_library

ARCHITECTURES = ("sm_80", "sm_90")
"""What is built unless told otherwise: A100 and H100; newer devices run the last one's, compiled as they load it."""
SOURCES = Path(__file__).parent / "csrc" / "cuda"


def nvcc() -> Path | None:
    """Returns the CUDA compiler: of CUDA_HOME, or on the PATH."""
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else None
    found = found or shutil.which("nvcc")
    return None if found is None else Path(found)


def build_cuda(architectures: Sequence[str] = ARCHITECTURES, target: Path | None = None) -> Path:
    """Compiles csrc/cuda into one library, which appears as a whole or not at all.

    Args:
        architectures: such as "sm_90"; code for the last one is also kept as PTX, which newer devices can run.
        target: where to; beside this file, where it is found, if unset.
    Returns: where the library is.
    Raises: OpError: an architecture that is none, no nvcc, a folder that cannot be written, or a failed compilation.
    """
    if not architectures:
        raise OpError("--arch names no architecture: they look like sm_80 or sm_90.")
    for architecture in architectures:
        if not re.fullmatch(r"sm_\d{2,3}[a-z]?", architecture):
            raise OpError(f"--arch {architecture} is no architecture: they look like sm_80 or sm_90.")
    compiler = nvcc()
    if compiler is None:
        raise OpError("nvcc was not found: install the CUDA toolkit, and set CUDA_HOME or PATH to it.")
    target = target or cuda_library()
    if not os.access(target.parent, os.W_OK):
        raise OpError(f"{target.parent} cannot be written: build as the user that installed shardlight.")
    fresh = target.with_suffix(f".{os.getpid()}.so")
    last = architectures[-1].removeprefix("sm_")
    command = [str(compiler), "-shared", "-std=c++17", "-O3", "-fmad=false", "-cudart", "static"]
    command += ["-Xcompiler", "-fPIC,-fvisibility=hidden", "--threads", str(os.cpu_count() or 1)]
    for architecture in architectures:
        number = architecture.removeprefix("sm_")
        command += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
    command += ["-gencode", f"arch=compute_{last},code=compute_{last}"]
    command += [*map(str, sorted(SOURCES.glob("*.cu"))), "-o", str(fresh)]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise OpError(f"nvcc failed ({run.returncode}):\n{_what_it_said(run)}")
        fresh.replace(target)
    except OSError as error:
        raise OpError(f"{error.filename or compiler}: {error.strerror}. Nothing was built.") from None
    finally:
        fresh.unlink(missing_ok=True)
    return target


def _what_it_said(run: "subprocess.CompletedProcess[str]") -> str:
    said = (run.stderr.strip() or run.stdout.strip() or "It said nothing.")[-2000:]
    if shutil.which(os.environ.get("NVCC_CCBIN") or "gcc") is None:
        said += "\nIt compiles with the host's C++ compiler, and there is none: install g++, or set NVCC_CCBIN to one."
    return said
