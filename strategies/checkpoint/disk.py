"""Writing files so that they are complete and on disk, or not there under their name."""

import ctypes
import errno
import os
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

_AT_FDCWD, _EXCHANGE, _BEGIN = -100, 2, 2


def write_all(file: int, data: memoryview | bytes) -> None:
    """Writes all of `data`. Raises: OSError: such as a full disk."""
    rest = memoryview(data)
    while rest:
        written = os.write(file, rest)
        if not written:
            raise OSError(errno.EIO, "nothing was written")
        rest = rest[written:]


def start_writing(file: int, start: int, nbytes: int) -> None:
    """Lets the system begin to bring bytes of a file to disk, where it can, and does not wait for them.

    By itself Linux begins when much is waiting, or with `fsync`: until then the disk would be idle.
    """
    call = _of_libc("sync_file_range")
    if call is not None:
        # Whatever the answer is: `fsync` tells what could not be written.
        call(file, ctypes.c_int64(start), ctypes.c_int64(nbytes), ctypes.c_uint(_BEGIN))


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on disk."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write_file(path: Path, data: bytes) -> None:
    """Writes a file and waits until it is on disk."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(file, data)
        os.fsync(file)
    finally:
        os.close(file)


def publish(written: Path, target: Path) -> None:
    """Gives a complete folder its final name; what had that name before is removed afterwards.

    Where the system can exchange two names there is a complete folder under `target` at every moment; elsewhere, for
    an instant, under `.NAME.replaced` only.
    """
    old = target.with_name(f".{target.name}.replaced")
    if target.is_symlink() or target.is_file():
        target.unlink()
    if not target.exists():
        os.rename(written, target)
    elif _exchange(written, target):
        old = written
    else:
        remove_folder(old)
        os.rename(target, old)
        os.rename(written, target)
    sync_folder(target.parent)
    with suppress(OSError):  # the new one is there; what is left of the old one goes with the next save
        remove_folder(old)


def remove_folder(folder: Path) -> None:
    """Removes a folder if it is there, so that it stops to be a checkpoint first. Raises: OSError."""
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / "manifest.json").unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


@cache
def _of_libc(name: str) -> Any:
    """Returns a function that only some systems have."""
    return getattr(ctypes.CDLL(None, use_errno=True), name, None)


def _exchange(a: Path, b: Path) -> bool:
    """Exchanges two names in one step; returns whether the system can."""
    call = _of_libc("renameat2")
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), ctypes.c_uint(_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(b))
