"""Byte-level BPE tokenizers: any bytes in, no unknown token, one end-of-text token between
documents; and the ids of the tokens that an objective adds to text.

Byte-pair encoding is Sennrich et al., arXiv 1508.07909; on bytes, with the regular expression
that keeps words apart, Radford et al. 2019 (GPT-2). The `tokenizers` library does the work. The
alphabet is all 256 bytes, so a vocabulary of 257 is that and `<|endoftext|>`, without merges.

The library's training returns to Python only when it is done, after minutes for a large corpus, and
no signal is handled before. So it runs in a process, `python -m mpctl.train.data.tokenizer SIZE`, which
can be killed. It reads texts from stdin, each after its length in 8 bytes, then END, and writes
tokenizer.json to stdout. Without END, as when the parent dies, it ends.

Special tokens: a name among the tokenizer's added tokens keeps its id. The others take ids that no
text uses, from the top of the model's vocabulary downward, as T5's sentinels do (arXiv 1910.10683,
section 3.1.4).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

from mpctl.core.errors import InputError, RunFailed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
# Other tokenizers' names of it: Llama 3; T5 and Llama 2; many small ones.
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
SMALLEST_VOCABULARY = 257
TOKENIZER_HINT = "give a tokenizer.json as the tokenizers library saves it"

Progress = Callable[[str, int, int], None]
"""Called as (stage, done, total): total is 0 when it is not known."""


def check_trainable(vocab_size: int) -> None:
    """InputError for a vocabulary below 257."""
    if vocab_size < SMALLEST_VOCABULARY:
        message = f"{vocab_size} entries do not hold the 256 bytes and {END_OF_TEXT}"
        hint = f"use {SMALLEST_VOCABULARY} or more"
        raise InputError.of("vocab-too-small", "data.vocab_size", message, hint)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """A tokenizer of at most `vocab_size` entries, the same for the same texts.

    A small corpus may yield fewer entries. InputError for a vocabulary below 257. No signal is
    handled before the library is done: train_apart runs it where that may take long.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    check_trainable(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _plain(tokenizer)


def alphabet() -> list[str]:
    """The 256 characters that represent the bytes, sorted."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def find_tokenizer(path: Path) -> Path:
    """The tokenizer.json for a path: the file itself, or that of prepared data or of a run."""
    files = [path / "tokenizer.json", path / "data" / "tokenizer.json"] if path.is_dir() else []
    return next((file for file in files if file.is_file()), path)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, without its truncation and padding; or InputError."""
    from tokenizers import Tokenizer

    text = tokenizer_text(path)
    try:
        return _plain(Tokenizer.from_str(text))
    except Exception as error:  # the library raises bare Exception
        message = f"not a tokenizer: {error}"
        raise InputError.of("tokenizer-damaged", str(path), message, TOKENIZER_HINT) from None


def tokenizer_text(path: Path) -> str:
    """The text of a tokenizer.json; InputError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"not readable: {error}"
        raise InputError.of("tokenizer-unreadable", str(path), message, TOKENIZER_HINT) from None


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    """No truncation, and `<|endoftext|>` inside a text is plain text: it must not end it."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id, added tokens included: ids may leave gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """The id that ends a document; InputError when the vocabulary knows no such token."""
    for name in END_OF_TEXT_NAMES:
        token = tokenizer.token_to_id(name)
        if token is not None:
            return token
    message = f"the vocabulary holds none of {', '.join(END_OF_TEXT_NAMES)}"
    hint = f"add {END_OF_TEXT} as a special token"
    raise InputError.of("tokenizer-end-of-text", "data.tokenizer", message, hint)


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The ids of each text, without end-of-text; InputError where the tokenizer cannot encode
    one."""
    try:
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    except Exception as error:  # the library raises bare Exception
        hint = "use a byte-level tokenizer, or one with an unknown token"
        message = f"cannot encode the corpus: {error}"
        raise InputError.of("tokenizer-encode", "data.tokenizer", message, hint) from None
    return [encoding.ids for encoding in encodings]


RULE = "special-tokens-fit"


def special_ids(added: Mapping[str, int], names: Sequence[str], *, vocab: int, words: int) -> dict[str, int]:
    """The id of each name, in the order of `names`; text uses range(words) of range(vocab).

    InputError when the reserved ids would reach into those of the text.
    """
    missing = missing_tokens(added, names)
    if missing and vocab - len(missing) < words:
        some = missing if len(missing) < 4 else [missing[0], f"{missing[1]} ... {missing[-1]}"]
        raise InputError.of(
            RULE,
            "model.vocab",
            f"{vocab} ids leave {max(0, vocab - words)} free beside the tokenizer's {words}, "
            f"but {', '.join(some)} need {len(missing)}",
            f"use {words + len(missing)} or more, or a tokenizer that has them as added tokens",
        )
    for name in names:
        if added.get(name, 0) >= words:  # it could meet a reserved one
            raise InputError.of(
                RULE,
                "data",
                f"{name} has the id {added[name]}, but the data's tokenizer uses ids below {words}",
                "run `mpctl data prepare` with --overwrite",
            )
    reserved = {name: vocab - 1 - index for index, name in enumerate(missing)}
    return {name: reserved[name] if name in reserved else added[name] for name in names}


def missing_tokens(added: Mapping[str, int], names: Sequence[str]) -> list[str]:
    """The names that are not among the tokenizer's added tokens; each reserves an id."""
    return [name for name in names if name not in added]


def added_tokens(path: Path) -> dict[str, int]:
    """Names and ids of the added tokens of a tokenizer.json; InputError for another file."""
    text = tokenizer_text(path)
    try:
        read = json.loads(text)
        return dict(_entry(entry) for entry in read.get("added_tokens") or [])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        message = f"not a tokenizer: {type(error).__name__}: {error}"
        raise InputError.of("tokenizer-damaged", str(path), message, TOKENIZER_HINT) from None


def _entry(entry: Any) -> tuple[str, int]:
    name, token = entry["content"], entry["id"]
    if type(name) is not str or type(token) is not int or token < 0:
        raise ValueError(f"added token {name!r} has the id {token!r}")
    return name, token


END = 2**64 - 1
MODULE = "mpctl.train.data.tokenizer"


def train_apart(texts: Iterable[str], *, vocab_size: int, total: int, on_progress: Progress) -> str:
    """The text of a tokenizer.json; see train_tokenizer. RunFailed when the process is killed."""
    check_trainable(vocab_size)
    command = [sys.executable, "-P", "-m", MODULE, str(vocab_size)]
    pipe = subprocess.PIPE
    with TemporaryFile() as words, subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=words) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it has ended: see its exit code
                for done, text in enumerate(texts, start=1):
                    content = text.encode()
                    child.stdin.write(len(content).to_bytes(8, "little") + content)
                    on_progress("count words", done, total)
                child.stdin.write(END.to_bytes(8, "little"))
            with suppress(OSError):
                child.stdin.close()
            on_progress("learn merges", 0, 0)
            written = child.stdout.read()
        except BaseException:
            child.kill()
            with suppress(OSError):
                child.stdin.close()
            raise
        if child.wait():
            words.seek(0)
            raise _failed(child.returncode, words.read().decode(errors="replace"))
    return written.decode()


def _failed(code: int, words: str) -> RunFailed:
    """Exit codes below 0 are signals: the kernel kills with 9 when memory runs out."""
    last = next((line for line in reversed(words.splitlines()) if line.strip()), "no message")
    why = f"was killed by signal {-code}, as when memory runs out" if code < 0 else f"failed: {last}"
    return RunFailed(f"training the tokenizer {why}; try --max-bytes with less text")


def _received(stream: IO[bytes]) -> Iterator[str]:
    while (length := int.from_bytes(_read(stream, 8), "little")) != END:
        yield _read(stream, length).decode()


def _read(stream: IO[bytes], count: int) -> bytes:
    content = stream.read(count)
    if len(content) < count:
        raise SystemExit("the process that sent the texts has ended")
    return content


if __name__ == "__main__":
    trained = train_tokenizer(_received(sys.stdin.buffer), vocab_size=int(sys.argv[1]))
    sys.stdout.buffer.write(trained.to_str(pretty=True).encode())
