"""A FUSE server for tests. It serves a few files and stops responding on request.

Run this module as a script with the descriptor of an open /dev/fuse and NAME=PATH for each file. It responds until
SIGUSR1. After SIGUSR1 it still reads requests but does not respond. A process cannot be killed after the server has
read its request; before that it can. Message layout: linux/fuse.h, see fuse(4).
"""

import errno
import os
import signal
import stat
import struct
import sys

HEADER, ANSWER = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<6Q10I")
LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH = 1, 2, 3, 14, 15, 17, 18, 25
INIT, OPENDIR, READDIR, RELEASEDIR, INTERRUPT, BATCH_FORGET = 26, 27, 28, 29, 36, 42
UNANSWERED = (FORGET, INTERRUPT, BATCH_FORGET)
MAX_WRITE = 128 << 10


class Files:
    """A folder of files. Node 1 is the folder, node 2 the first file. Only the page cache caches data."""

    def __init__(self, files: dict[str, str]) -> None:
        self.names = list(files)
        self.contents = [os.open(path, os.O_RDONLY) for path in files.values()]

    def attributes(self, node: int) -> bytes:
        size = os.fstat(self.contents[node - 2]).st_size if node > 1 else 0
        mode = stat.S_IFREG | 0o755 if node > 1 else stat.S_IFDIR | 0o755
        return ATTRIBUTES.pack(node, size, (size + 511) // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def answer(self, operation: int, node: int, body: bytes) -> bytes | int:
        """Return the body of the response, without header, or an errno."""
        match operation:
            case 26:
                return struct.pack("<IIIIHHIIHHI7I", 7, 31, MAX_WRITE, 0, 12, 9, MAX_WRITE, 1, 32, 0, *[0] * 8)
            case 1:
                name = body.rstrip(b"\0").decode()
                if name not in self.names:
                    return errno.ENOENT
                found = self.names.index(name) + 2
                return struct.pack("<4Q2I", found, 0, 0, 0, 0, 0) + self.attributes(found)
            case 3:
                return struct.pack("<QII", 0, 0, 0) + self.attributes(node)
            case 14 | 27:
                return struct.pack("<QII", 0, 0, 0)
            case 15:
                _, offset, size = struct.unpack_from("<QQI", body)
                return os.pread(self.contents[node - 2], size, offset)
            case 17:
                return struct.pack("<5Q10I", 1000, 500, 500, 100, 50, 4096, 255, 4096, *[0] * 7)
            case 18 | 25 | 28 | 29:
                return b""
        return errno.ENOSYS


def serve(device: int, files: Files) -> None:
    answering = True

    def fall_silent(number: int, frame: object) -> None:
        nonlocal answering
        answering = False

    signal.signal(signal.SIGUSR1, fall_silent)
    while True:
        try:
            request = os.read(device, MAX_WRITE + 8192)
        except OSError as error:
            if error.errno in (errno.EINTR, errno.ENOENT):  # the request was interrupted before the server read it
                continue
            return
        _, operation, unique, node, *_ = HEADER.unpack_from(request)
        if not answering or operation in UNANSWERED:
            continue
        answer = files.answer(operation, node, request[HEADER.size :])
        body, code = (b"", -answer) if isinstance(answer, int) else (answer, 0)
        try:
            os.write(device, ANSWER.pack(ANSWER.size + len(body), code, unique) + body)
        except OSError as error:
            if error.errno != errno.ENOENT:  # the requesting process is gone
                return


if __name__ == "__main__":
    serve(int(sys.argv[1]), Files(dict(word.split("=", 1) for word in sys.argv[2:])))
