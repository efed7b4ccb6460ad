"""Trains a tokenizer in a process of its own, so that a stop ends it at once.

The library's training comes back to Python only when it is done, which is after minutes for a large
corpus: no signal is noticed before. A process can be killed meanwhile, and gives its memory back.
Texts go to its stdin, each behind its length in 8 bytes, and END follows the last one;
tokenizer.json comes from its stdout. A parent that dies sends no END, and then the child ends too.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from tempfile import TemporaryFile
from typing import IO

from mpctl.data.tokenizer import Progress, check_trainable, train_tokenizer
from mpctl.errors import RunFailed

END = 2**64 - 1
MODULE = "mpctl.data.train_child"


def train_apart(texts: Iterable[str], *, vocab_size: int, total: int, on_progress: Progress) -> str:
    """The text of a tokenizer.json; see train_tokenizer. RunFailed when the process is killed."""
    check_trainable(vocab_size)
    command = [sys.executable, "-P", "-m", MODULE, str(vocab_size)]
    pipe = subprocess.PIPE
    with (
        TemporaryFile() as words,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=words) as child,
    ):
        assert child.stdin is not None and child.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it has ended: its exit code says how
                _send(_counted(texts, total, on_progress), child.stdin)
            with suppress(OSError):
                child.stdin.close()
            on_progress("learn merges", 0, 0)
            text = child.stdout.read()
        except BaseException:
            child.kill()
            with suppress(OSError):
                child.stdin.close()
            raise
        if child.wait():
            words.seek(0)
            raise _failed(child.returncode, words.read().decode(errors="replace"))
    return text.decode()


def _counted(texts: Iterable[str], total: int, report: Progress) -> Iterator[str]:
    for done, text in enumerate(texts, start=1):
        yield text
        report("count words", done, total)


def _send(texts: Iterable[str], stream: IO[bytes]) -> None:
    for text in texts:
        content = text.encode()
        stream.write(len(content).to_bytes(8, "little") + content)
    stream.write(END.to_bytes(8, "little"))


def _failed(code: int, words: str) -> RunFailed:
    """Exit codes below 0 are signals: the kernel kills with 9 when memory runs out."""
    last = next((line for line in reversed(words.splitlines()) if line.strip()), "no message")
    why = (
        f"was killed by signal {-code}, as when memory runs out" if code < 0 else f"failed: {last}"
    )
    return RunFailed(f"training the tokenizer {why}; try --max-bytes with less text")


def _received(stream: IO[bytes]) -> Iterator[str]:
    while (length := int.from_bytes(_read(stream, 8), "little")) != END:
        yield _read(stream, length).decode()


def _read(stream: IO[bytes], count: int) -> bytes:
    content = stream.read(count)
    if len(content) < count:
        raise SystemExit("the process that sent the texts has ended")
    return content


def _main() -> None:
    tokenizer = train_tokenizer(_received(sys.stdin.buffer), vocab_size=int(sys.argv[1]))
    sys.stdout.buffer.write(tokenizer.to_str(pretty=True).encode())


if __name__ == "__main__":
    _main()
