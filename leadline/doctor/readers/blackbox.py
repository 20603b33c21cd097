"""leadline's black boxes: one step at token level, in the format of safetensors, read without torch."""

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from leadline.doctor.readers.bounds import Source
from leadline.doctor.readers.dumps import gap, spread, step_in_name
from leadline.doctor.readers.json_rows import parse

MAX_HEADER = 16 << 20
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1", "BOOL": "?"}
NEEDED = ("rollout_logprobs", "seen_tokens", "seen_old_logprobs", "completion_of_token")

Arrays = Mapping[str, np.ndarray[Any, Any]]


def is_safetensors(head: bytes) -> bool:
    """A length of eight bytes and then a JSON object."""
    return len(head) > 9 and int.from_bytes(head[:8], "little") < MAX_HEADER and head[8:9] == b"{"


def blackbox_row(source: Source) -> dict[str, Any] | None:
    """The step in canonical quantities; None if the file holds other tensors, such as weights."""
    arrays = _arrays(source)
    if any(name not in arrays for name in NEEDED):
        return None
    seen = arrays["seen_tokens"].astype(np.int64)
    sampler = arrays["rollout_logprobs"].astype(np.float64)
    trainer = arrays["seen_old_logprobs"].astype(np.float64)
    if len(seen) != len(trainer) or (len(seen) and (seen.min() < 0 or seen.max() >= len(sampler))):
        return None
    sampler, owner = sampler[seen], arrays["completion_of_token"][seen]
    parts = [
        (sampler[owner == one], trainer[owner == one], np.ones(int((owner == one).sum()))) for one in np.unique(owner)
    ]
    row: dict[str, Any] = {"step": step_in_name(source.name) or 1}
    if parts:
        row |= gap(parts)
    rewards = arrays.get("rewards", np.empty(0)).astype(np.float64)
    row |= spread(rewards[np.isfinite(rewards)].tolist())
    advantages = arrays.get("advantages", np.empty(0)).astype(np.float64)
    if len(advantages) and np.isfinite(advantages).any():
        row |= {
            "advantage/abs_mean": float(np.nanmean(np.abs(advantages))),
            "advantage/max": float(np.nanmax(advantages)),
            "advantage/min": float(np.nanmin(advantages)),
        }
    if len(arrays.get("seen_entropies", ())):
        row["policy/entropy"] = float(np.mean(arrays["seen_entropies"]))
    return row


def _arrays(source: Source) -> Arrays:
    """The tensors of one axis in the file; others are no black box's."""
    data = source.whole()
    (length,) = struct.unpack_from("<Q", data)
    try:
        header = parse(data[8 : 8 + length])
    except ValueError:
        return {}
    arrays = {}
    for name, entry in header.items() if isinstance(header, dict) else ():
        dtype = _DTYPES.get(entry.get("dtype", "")) if isinstance(entry, dict) else None
        if dtype is None or len(entry.get("shape", ())) != 1:
            continue
        first, end = entry["data_offsets"]
        piece = data[8 + length + first : 8 + length + end]
        if len(piece) % np.dtype(dtype).itemsize == 0:
            arrays[name] = np.frombuffer(piece, dtype)
    return arrays
