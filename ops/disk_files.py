"""The files of a disk engine: their space reserved, O_DIRECT where they take it, and what to do when they fail."""

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import sys
from pathlib import Path

BLOCK_BYTES = 4096
"""What offsets, lengths and addresses of direct requests are multiples of."""
_O_DIRECT = getattr(os, "O_DIRECT", 0)


class DiskError(OSError):
    """A file cannot be used as it is asked to; names it, what was asked, and the mend. `errno` is the system's."""

    def __str__(self) -> str:
        return str(self.strerror)


def whole_blocks(nbytes: int) -> int:
    """Returns bytes rounded up to whole blocks."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def open_file(path: Path, nbytes: int, create: bool, direct: bool) -> tuple[int, int, str | None]:
    """Returns a file's descriptor, its size, and why it is not direct.

    Args:
        nbytes: that it has at least; of a new one, rounded up to whole blocks, all that it has.
        create: it is new, and its space is reserved.
    Raises: DiskError: it is there already, or not; it is too short; there is no space for it.
    """
    if nbytes < 0:
        raise ValueError(f"{path}: nbytes is {nbytes}: a file has at least 0.")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
    except OSError as error:
        what = "created" if create else "opened"
        why = f"{path}: cannot be {what}: {error.strerror}. {mend(error.errno, path)}"
        raise DiskError(error.errno, why) from None
    try:
        if create:
            reserve(descriptor, path, whole_blocks(nbytes))
        size = os.fstat(descriptor).st_size
        if size < nbytes:
            raise DiskError(errno.EINVAL, f"{path}: the file is {size} bytes, needs {nbytes}. Start with a new one.")
        return descriptor, size, _why_not_direct(descriptor, size) if direct else "direct=False is set"
    except OSError as error:
        os.close(descriptor)
        if create:
            path.unlink()
        if isinstance(error, DiskError):
            raise
        why = f"{path}: cannot be read: {error.strerror}. {mend(error.errno, path)}"
        raise DiskError(error.errno, why) from None


@functools.cache
def _fallocate() -> "ctypes._NamedFuncPointer":
    function = ctypes.CDLL(None, use_errno=True).fallocate
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function


def reserve(descriptor: int, path: Path, nbytes: int) -> None:
    """Makes a file at least so large and takes the space. glibc's posix_fallocate would write to each block."""
    there = os.fstat(descriptor).st_size
    while nbytes and (sys.platform != "linux" or _fallocate()(descriptor, 0, 0, nbytes)):
        error = ctypes.get_errno() if sys.platform == "linux" else errno.EOPNOTSUPP
        if error == errno.EOPNOTSUPP:
            if there + _free_bytes(path) >= nbytes:
                return os.ftruncate(descriptor, max(there, nbytes))
            error = errno.ENOSPC
        if error != errno.EINTR:
            if os.fstat(descriptor).st_size > there:  # some of it was given
                os.ftruncate(descriptor, there)
            why = f"{os.strerror(error)} ({errno.errorcode.get(error, error)})"
            raise DiskError(error, f"{path}: cannot reserve {nbytes} bytes: {why}. {mend(error, path)}")


def _why_not_direct(descriptor: int, size: int) -> str | None:
    """Makes a descriptor direct and tries it; returns why it is not."""
    if size % BLOCK_BYTES:
        return f"its size of {size} bytes is no multiple of {BLOCK_BYTES}"
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _O_DIRECT)
        with mmap.mmap(-1, BLOCK_BYTES) as block:
            os.preadv(descriptor, [block], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return f"its file system takes no O_DIRECT in blocks of {BLOCK_BYTES} bytes"
    return None if _O_DIRECT else "this system has no O_DIRECT"


def _free_bytes(path: Path) -> int:
    found = os.statvfs(path.parent)
    return found.f_bavail * found.f_frsize


def mend(error: int | None, path: Path) -> str:
    """Returns what to do about an errno of a file."""
    if error in (errno.ENOSPC, errno.EDQUOT):
        try:
            return f"{_free_bytes(path)} bytes are free there: make room, or use a folder on another disk."
        except OSError:
            return "Make room, or use a folder on another disk."
    mends = {
        errno.EIO: "The disk or its connection fails: see the kernel's log, and use another disk.",
        errno.EFBIG: "Raise the limit of a file's size (ulimit -f), or use another file system.",
        errno.EEXIST: "Remove it, or use another folder.",
        errno.ENOENT: "Check the path.",
        errno.EISDIR: "Give a file's path.",
        errno.ENOTDIR: "Check the path.",
        errno.EROFS: "Use a folder that can be written to.",
        errno.EACCES: "Use a folder that this user can write to.",
        errno.EPERM: "Use a folder that this user can write to.",
        errno.EMFILE: "Raise the limit of open files, ulimit -n.",
    }
    return mends.get(error or 0, "Use another folder if it stays so.")
