"""Convert text to token indices, by characters or words, and to windows of tokens."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]

UNKNOWN = "<unk>"
"""Word 0 of every vocabulary."""
END_OF_LINE = "<eos>"
"""Word 1 of every vocabulary."""
CHARACTERS = 97
"""Number of symbols of `character_tokens`: 1 is the end of a line, then printable ASCII; 0 is anything else."""
_FIRST_PRINTABLE, _LAST_PRINTABLE = 32, 126


def character_tokens(text: str) -> Tokens:
    """The token of each character, below `CHARACTERS`; the table is fixed, so that all clients agree on it."""
    codes = np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32)
    printable = (codes >= _FIRST_PRINTABLE) & (codes <= _LAST_PRINTABLE)
    tokens = np.where(printable, codes.astype(np.int64) - _FIRST_PRINTABLE + 2, 0)
    tokens[codes == ord("\n")] = 1
    return tokens.astype(np.int64)


def split_words(text: str) -> list[str]:
    """The words of a text, split at white space, with `END_OF_LINE` after each line."""
    return [word for line in text.split("\n") for word in (*line.split(), END_OF_LINE)]


def build_vocabulary(words: Iterable[str], *, limit: int) -> Mapping[str, int]:
    """Number the most frequent words, equally frequent ones in alphabetical order; `UNKNOWN` is 0, `END_OF_LINE` 1.

    Args:
        words: words of the training part.
        limit: largest size of the vocabulary, at least 2.
    """
    counts = Counter(words)
    del counts[UNKNOWN], counts[END_OF_LINE]
    chosen = sorted(counts, key=lambda word: (-counts[word], word))[: limit - 2]
    return {word: number for number, word in enumerate((UNKNOWN, END_OF_LINE, *chosen))}


def word_tokens(words: Sequence[str], vocabulary: Mapping[str, int]) -> Tokens:
    """The token of each word; unknown words have the token of `UNKNOWN`."""
    unknown = vocabulary[UNKNOWN]
    return np.fromiter((vocabulary.get(word, unknown) for word in words), np.int64, len(words))


def token_windows(tokens: Tokens, context: int) -> tuple[Tokens, Tokens]:
    """Successive windows, (windows, context), and the token after each position, of the same shape.

    An incomplete window at the end is dropped.
    """
    count = max(len(tokens) - 1, 0) // context
    inputs = tokens[: count * context].reshape(count, context)
    return inputs.copy(), tokens[1 : count * context + 1].reshape(count, context).copy()
