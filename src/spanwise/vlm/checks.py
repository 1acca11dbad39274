"""What a batch is asked to collate, checked before and around the processor: every error names its row.

A processor sees a batch as one list of texts and one of media, and a template passes over what it does not know; so a
picture under a misspelt type would be lost, and a bad file would be somebody's, without a word. O(number of parts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from spanwise.spans.chat_template import UnprovenSpanError
from spanwise.vlm.families import TOKEN_AXES
from spanwise.vlm.media import Media, parts_of

# What other rows or other data would not mend.
NOT_THE_DATA = (ImportError, MemoryError, NameError)
KINDS = ("image", "video", "audio")
# The parts of a processor that read each kind of medium.
_READERS = {
    "image": ("image_processor",),
    "video": ("video_processor",),
    "audio": ("feature_extractor", "audio_processor", "audio_feature_extractor"),
}


def refuse_no_rows(examples: Sequence[Any] | Mapping[Any, Any]) -> None:
    """A batch of nothing is a mistake of the sampler; a slice of a data set of columns is no list of rows."""
    if isinstance(examples, Mapping):
        raise ValueError(
            f"a dict with the keys {sorted(map(str, examples))} was given; expected a list of rows. A slice of a data "
            "set gives columns. Fix: pass [dataset[place] for place in range(4)], or let a DataLoader gather rows."
        )
    if not len(examples):
        raise ValueError(
            "a batch of 0 rows was given; expected at least one. The data set or the sampler is empty. "
            "Fix: check the data set's length, and drop_last in the DataLoader."
        )


def conversations_of(examples: Sequence[Any], *, need_assistant: bool) -> list[Any]:
    """The rows' conversations; a row without one, or without an assistant turn, is an error that names it."""
    refuse_no_rows(examples)
    conversations = [_conversation_of(example, row) for row, example in enumerate(examples)]
    for row, conversation in enumerate(conversations):
        if need_assistant and not any(message.get("role") == "assistant" for message in conversation):
            raise ValueError(
                f"row {row} has roles {[message.get('role') for message in conversation]}; expected at least one "
                "assistant turn to train on. The answer is missing or its role is spelt otherwise. "
                "Fix: leave the row out, or name the role 'assistant'."
            )
        for message in conversation:
            _refuse_lost_text(message, row)
            _refuse_lost_media(message, row)
    return conversations


def _conversation_of(example: Any, row: int) -> Any:
    if not isinstance(example, Mapping):
        raise ValueError(
            f"row {row} is {_shown(example)}; expected a dict with a list of messages under 'conversation'. The "
            "messages were probably passed without their row. Fix: wrap them as {'conversation': messages}."
        )
    conversation = example.get("conversation")
    if conversation is None or (isinstance(conversation, (list, tuple, str)) and not conversation):
        raise ValueError(
            f"row {row} has keys {sorted(map(str, example))} and no 'conversation'; expected a list of messages with "
            "role and content under that key. The data set probably names it otherwise. Fix: rename the column."
        )
    if not isinstance(conversation, (list, tuple)) or not all(isinstance(m, Mapping) for m in conversation):
        raise ValueError(
            f"row {row}: its conversation is {_shown(conversation)}; expected a list of messages, each a dict with "
            "role and content. The column holds plain text, an array, or chats that were stored as JSON. Fix: parse "
            "it, call .tolist(), or wrap the text as [{'role': 'user', 'content': …}, {'role': 'assistant', …}]."
        )
    return conversation


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {sorted({type(entry).__name__ for entry in value})}"
    return f"a {type(value).__name__}"


def _refuse_lost_text(message: Mapping[str, Any], row: int) -> None:
    """Templates print what is no text as "None", or pass over it."""
    content, role = message.get("content"), message.get("role")
    parts = content if isinstance(content, (list, tuple)) else []
    odd = [part for part in parts if not isinstance(part, Mapping)]
    odd += [part for part in parts_of(message) if part.get("type") == "text" and not isinstance(part.get("text"), str)]
    if odd or (content is None and role in ("user", "system")):
        given = f"a part {odd[0]!r:.60}" if odd else "no content"
        raise ValueError(
            f"row {row}: a message of the role {role!r} has {given}; expected text, or parts that are dicts, those of "
            "type 'text' with a string under 'text'. Templates would print None, or nothing at all. The field was "
            "empty when the row was written, or the text stands bare in the list. Fix: write "
            "{'type': 'text', 'text': '…'}, or leave the message out."
        )


def _refuse_lost_media(message: Mapping[str, Any], row: int) -> None:
    """A medium under a type or key that no template knows would be passed over."""
    for part in parts_of(message):
        kind = part.get("type")
        misnamed = isinstance(kind, str) and kind not in KINDS and any(known in kind for known in KINDS)
        lost = kind not in KINDS and any(part.get(key) is not None for key in (*KINDS, "image_url"))
        if misnamed or lost:
            raise ValueError(
                f"row {row}: a part of type {kind!r} has the keys {sorted(map(str, part))}; expected the types "
                "'text', 'image', 'video' and 'audio', since templates pass over others and the medium would be lost. "
                "It probably follows another library's spelling. Fix: write it as {'type': 'image', 'image': …}, with "
                "a PIL image, a path or a URL."
            )


def refuse_unmatched(texts: Sequence[str], conversations: Sequence[Any], media: Media, processor: Any) -> None:
    """Placeholders, parts and media of every kind must agree row by row; a processor would only see the sum."""
    for kind, given in (("image", media.images), ("video", media.videos), ("audio", media.audio)):
        _refuse_mismatch(texts, given, processor, kind)
        _refuse_empty_parts(conversations, given, kind)


def refuse_unreadable(conversations: Sequence[Any], media: Media, processor: Any) -> None:
    """What can be said of remote code, whose placeholders may be any text: a medium it has no part for, or none."""
    for kind, given in (("image", media.images), ("video", media.videos), ("audio", media.audio)):
        _refuse_unread(given, processor, kind)
        _refuse_empty_parts(conversations, given, kind)


def _refuse_mismatch(texts: Sequence[str], media: Sequence[Sequence[Any]], processor: Any, kind: str) -> None:
    word = getattr(processor, f"{kind}_token", None)
    if not isinstance(word, str) or not word:
        _refuse_unread(media, processor, kind)
        return
    for row, (text, given) in enumerate(zip(texts, media, strict=True)):
        found = text.count(word)
        if found != len(given):
            raise ValueError(
                f"row {row} renders {found} placeholders {word!r} and brings {len(given)} {kind}s; expected as many of "
                f"one as of the other. Somebody typed the placeholder, a part has no {kind}, or the template drops it. "
                f"Fix: give every {kind} part its {kind}; sanitize=True breaks up placeholders that users typed, and "
                "answers must spell them otherwise."
            )


def _refuse_empty_parts(conversations: Sequence[Any], media: Sequence[Sequence[Any]], kind: str) -> None:
    """A part that brings nothing, where the template prints nothing for it either."""
    for row, (conversation, given) in enumerate(zip(conversations, media, strict=True)):
        parts = sum(part.get("type") == kind for message in conversation for part in parts_of(message))
        if parts > len(given):
            raise ValueError(
                f"row {row} has {parts} {kind} parts and brings {len(given)}; expected one for each part. A file was "
                f"left out when the row was written, or it stands under another key. Fix: put it under {kind!r} in its "
                "part, or leave the part out."
            )


def _refuse_unread(media: Sequence[Sequence[Any]], processor: Any, kind: str) -> None:
    """A processor without a placeholder and a reader for this kind would pass over such media without a word."""
    if any(getattr(processor, name, None) is not None for name in _READERS[kind]):
        return
    rows = [row for row, given in enumerate(media) if given]
    if rows:
        raise ValueError(
            f"row {rows[0]} brings media of type {kind!r} to a {type(processor).__name__}; expected a processor that "
            "reads that type, since this one would collate the row as if it had none. The model does not take them, or "
            f"another processor was meant. Fix: leave {kind} out of the rows, or load a processor that takes it."
        )


def refuse_uneven(rows: Sequence[Mapping[str, Any]], *needed: str) -> None:
    """Tokenized rows must have what is needed, and one entry per token in each: padding would hide the difference."""
    for row, tensors in enumerate(rows):
        missing = [key for key in needed if tensors.get(key) is None]
        sizes = {
            key: int(torch.as_tensor(value).shape[-1])
            for key, value in tensors.items()
            if TOKEN_AXES.get(key) == -1 and value is not None
        }
        if missing or len(set(sizes.values())) > 1:
            raise ValueError(
                f"row {row} has tokens per key {sizes} and lacks {missing or 'nothing'}; expected {list(needed)}, all "
                "of one length. It was shifted in one of them only, or written by something else. Fix: make rows with "
                "PreTokenizedDatasetWrapper and packs with PackedDatasetWrapper."
            )


@contextmanager
def renumbered(row: int) -> Iterator[None]:
    """Errors of a row that was collated alone, as ``row 0``, under the number by which its caller knows it.

    >>> with renumbered(7):
    ...     raise ValueError("row 0 has no answer")
    Traceback (most recent call last):
    ValueError: row 7 has no answer
    """
    try:
        yield
    except ValueError as error:
        text = str(error)
        kind = UnprovenSpanError if isinstance(error, UnprovenSpanError) else ValueError
        raise kind(f"row {row}{text[5:]}" if text.startswith("row 0") else f"row {row}: {text}") from error


def said_by_row(call: Callable[[Sequence[int]], Any], rows: Sequence[int], processor: Any) -> Any:
    """``call(rows)``, the processor's answer to a batch; if it fails, an error that names the row.

    The row is found by asking again for each row alone, which costs nothing where nothing fails.
    """
    try:
        return call(rows)
    except NOT_THE_DATA:
        raise
    except Exception as error:  # processors raise anything
        if isinstance(error, ValueError) and "Fix: " in str(error):
            raise  # one of ours, which says it all
        for row in rows:
            try:
                call([row])
            except Exception as alone:  # the same
                raise _refused(processor, f"row {row}", alone) from alone
        raise _refused(processor, f"a batch of {len(rows)} rows, each of which passes alone", error) from error


def _refused(processor: Any, what: str, error: Exception) -> ValueError:
    return ValueError(
        f"{what}: {type(processor).__name__} could not process it ({type(error).__name__}: {error}); expected text and "
        "media that this processor takes. A size or aspect ratio that it cannot use, a file or an address that it "
        "cannot read, or text that is no valid Unicode is the likely cause. Fix: mend the row or leave it out."
    )
