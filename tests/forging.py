"""Forgeries of saved caches: each is refused by a ValueError, or runs.

A case is a policy and a tier, such as scout-split. Each forgery has valid checksums. It is printed
before it is tried, so that the last line of a process that died names the cause.
"""

from __future__ import annotations

import copy
import json
import math
import os
import resource
import shutil
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from test_families import build
from test_fork import CASES, make
from tiny import decode, feed, prompt, tiny_model

from hf_offload import HybridCache
from hf_offload.files import tensor_file
from hf_offload.files.segments import checksum

PROMPT, STEPS = 205, 3
LAYER = 2  # whose fields are forged; the other layers' are alike
MEMORY = 4 << 20  # KiB
DEEP: Any = json.loads("[" * 300 + "]" * 300)
NUMBERS = (-1, 2, 7, 2**20, 2**31, 2**63, 10**400, 0.5, 1e308, math.nan, True, "7", None, [], {}, DEEP)
TEXTS = ("", "x", 7, None, [])

Tensors = dict[str, torch.Tensor]
Forgery = tuple[str, Callable[[Any, Tensors, Tensors], None]]
"""Its name, and what it does to the text, the tensors and the first segment of a cache."""


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The values in a JSON text, and the ways to them; of what there are many of a kind, one."""
    if path:
        yield path, value
    if not isinstance(value, dict | list):
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        alike = (
            (path == ("layers",) and key != LAYER)
            or (path[:1] == ("model",) and len(path) == 2 and list(value).index(key) != 2)
            or (isinstance(value, list) and len(value) > 8 and key > 1)
        )
        if not alike:
            yield from leaves(part, (*path, key))


def holder(text: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        text = text[key]
    return text


def put(path: tuple[Any, ...], new: Any, text: Any, *_: Any) -> None:
    holder(text, path)[path[-1]] = new


def drop(path: tuple[Any, ...], text: Any, *_: Any) -> None:
    del holder(text, path)[path[-1]]


def add(path: tuple[Any, ...], text: Any, *_: Any) -> None:
    there = holder(text, path)
    there.append(7) if isinstance(there, list) else there.__setitem__("more", 7)


def text_forgeries(about: Any) -> Iterator[Forgery]:
    for path, old in leaves(about):
        place = ".".join(map(str, path))
        for new in (*(TEXTS if isinstance(old, str) else NUMBERS), *((old + 1, old - 1) if type(old) is int else ())):
            if type(new) is not type(old) or new != old:
                yield f"{place} = {str(new)[:30]}", partial(put, path, new)
        yield f"{place} is missing", partial(drop, path)
        yield f"{place} has a neighbour", partial(add, path)


def values_for(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Wrong forms of a tensor."""
    if tensor.dtype == torch.bool:
        wrong: tuple[float, ...] = (0, 1)
    elif tensor.dtype.is_floating_point:
        wrong = (math.nan, math.inf, -math.inf, -1.0, 1e38 if tensor.dtype != torch.float16 else 6e4)
    else:
        info = torch.iinfo(tensor.dtype)
        wrong = (info.min, -1 if info.min else 2, 1, 64, info.max)
    for value in wrong:
        yield f"full of {value}", torch.full_like(tensor, value)
        for place in {0, tensor.numel() - 1} if tensor.numel() else ():
            found = tensor.clone()
            found.view(-1)[place] = value
            yield f"[{place}] = {value}", found
    yield "as integers", tensor.nan_to_num().to(torch.int64 if tensor.dtype != torch.int64 else torch.int32)
    yield "as float16", tensor.to(torch.float16 if tensor.dtype != torch.float16 else torch.float32)
    yield "in one more axis", tensor[None]
    yield "flat", tensor.reshape(-1)
    if tensor.ndim > 1:
        yield "transposed", tensor.transpose(-1, -2).contiguous()
        yield "turned", tensor.permute(*reversed(range(tensor.ndim))).contiguous()
    for axis in range(tensor.ndim):
        yield f"twice as long along {axis}", torch.cat([tensor, tensor], axis)
        yield f"shorter along {axis}", tensor.narrow(axis, 0, max(tensor.shape[axis] - 1, 0)).clone()
        yield f"empty along {axis}", tensor.narrow(axis, 0, 0).clone()


def tensor_forgeries(tensors: Tensors, which: int) -> Iterator[Forgery]:
    """Forgeries of the tensors (1) or of the segment (2)."""

    def change(name: str, new: Tensors, *files: Any) -> None:
        files[which].update(new)
        if name not in new:
            del files[which][name]

    for name, tensor in tensors.items():
        if name.startswith("layers.") and not name.startswith(f"layers.{LAYER}."):
            continue
        for what, new in values_for(tensor):
            yield f"{name} {what}", partial(change, name, {name: new})
        yield f"{name} is missing", partial(change, name, {})
        yield f"{name} has another name", partial(change, name, {f"{name}.more": tensor})


def write(folder: Path, about: Any, tensors: Tensors, segment: Tensors | None = None) -> None:
    """Write the files of a cache, with valid checksums; its segment only if one is given."""
    if segment is not None:
        about = with_segment(folder, about, segment_file(segment))
    text = about if isinstance(about, str) else json.dumps(about)
    (folder / "cache.safetensors").write_bytes(tensor_file.pack(text, tensors))


def segment_file(tensors: Tensors) -> bytes:
    """A segment, aligned as a genuine one."""
    entries, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        dtype = str(tensor.dtype).removeprefix("torch.").replace("uint", "U").replace("bfloat", "BF")
        dtype = dtype.replace("float", "F").replace("int", "I").replace("bool", "BOOL")
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-(len(header) + 8) % 4096)
    parts = [tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors.values()]
    return len(header).to_bytes(8, "little") + header + b"".join(parts)


def with_segment(folder: Path, about: Any, data: bytes) -> Any:
    """Write a segment under the name of its checksum; the text that names it in place of the first."""
    digits = checksum(torch.frombuffer(bytearray(data), dtype=torch.uint8)) if data else 32 * "0"
    name = f"segment-{digits}.safetensors"
    (folder / name).write_bytes(data)
    return {**about, "segments": [name, *about["segments"][1:]]}


def header_forgeries(data: bytes) -> Iterator[tuple[str, bytes]]:
    """A safetensors file with other headers."""
    size = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]

    def made(text: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text + rest

    for length in (0, size - 1, size + 1, len(data), 2**31, 2**63, 2**64 - 1):
        yield f"header of {length} bytes", length.to_bytes(8, "little") + data[8:]
    yield "no header", b""
    yield "a deep header", made(b"[" * 100_000 + b"]" * 100_000)
    yield "a header of text", made(b'"x"')
    first = next((name for name in header if name != "__metadata__"), None)
    for name, wrong in {
        "data_offsets": ([0, 2**63], [-8, 0], [8, 0], [0], "x", [0, len(rest) + 8], [0.5, 8]),
        "dtype": ("F4", "F64", "C64", "x", 7),
        "shape": ([2**62, 4], [-1], [0, 2**62], "x", [0.5], []),
    }.items():
        for value in wrong if first else ():
            said = header | {first: header[first] | {name: value}}
            yield f"{first} {name} = {value}", made(json.dumps(said).encode())
    for value in (None, 7, {}, {"about": "[" * 100_000 + "]" * 100_000}, {"about": "7"}, {"about": "{"}):
        yield f"metadata {str(value)[:20]}", made(json.dumps(header | {"__metadata__": value}).encode())


def pipes(path: Path) -> Iterator[str]:
    """What never ends in place of a file."""
    for kind, create in (("a pipe", os.mkfifo), ("a device", lambda path: path.symlink_to("/dev/zero"))):
        path.unlink()
        create(path)
        yield f"{path.name} is {kind}"


class Trial:
    """Tries what was forged and counts what was wrong with that."""

    def __init__(self, every: int) -> None:
        self.every, self.seen = every, 0
        self.tried = self.refused = 0
        self.wrong: list[str] = []
        self.before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def __call__(self, name: str, run: Callable[[], None]) -> None:
        self.seen += 1
        if self.seen % self.every:
            return
        print(name, flush=True)
        self.tried += 1
        try:
            run()
            print("    runs", flush=True)
        except (ValueError, FileNotFoundError) as error:
            self.refused += 1
            print(f"    {error}", flush=True)
            if "\n" in str(error) or len(str(error)) > 900:
                self.wrong.append(f"{name}: {str(error)[:300]}")
        except BaseException as error:
            self.refused += 1
            if not isinstance(error, RuntimeError) or "stock" not in name:  # sizes of stock layers torch refuses
                self.wrong.append(f"{name}: {traceback.format_exc()[-700:]}")

    def end(self) -> None:
        """Raise what was wrong, if anything was."""
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.before
        if used > MEMORY:
            self.wrong.append(f"{used} KiB of memory")
        print(f"{self.tried} forgeries, {self.refused} refused, {used >> 10} MiB", flush=True)
        assert self.refused
        assert not self.wrong, "\n".join([f"{len(self.wrong)} WRONG", *self.wrong])


def saved(case: str, tier: str, folder: Path) -> Callable[..., None]:
    """Save a cache; what loads another folder like it and decodes."""
    family = "gemma3" if case == "sliding" else "llama"
    model = build("qwen3_next", "hybrid_sparse") if case == "linear" else tiny_model(family)
    ids, mask = prompt(2, PROMPT)
    cache = make(model, case if case in CASES else "scout", tier)
    token = feed(model, cache, ids, mask, (0, 90, PROMPT))[1][:, -1].argmax(-1, keepdim=True)
    token = decode(model, cache, token, mask, 19)[0][:, -1:]
    mask = torch.cat([mask, mask.new_ones(2, 19)], 1)
    cache.save(folder)
    want = decode(model, cache, token, mask, STEPS)[1]
    assert torch.equal(decode(model, HybridCache.load(folder, model), token, mask, STEPS)[1], want) or "int8" in case

    def run(forged: Path) -> None:
        loaded = HybridCache.load(forged, model, timeout=10.0)
        assert decode(model, loaded, token, mask, STEPS)[1].shape == want.shape
        if case in CASES:  # the others cannot forget
            loaded.fork().reorder_cache(torch.tensor([1, 1]))
            loaded.crop(-STEPS - 25)  # into the prompt
            loaded.to_dynamic()

    return run


def caches(case: str, tier: str, folder: Path, every: int) -> Trial:
    """Forgeries of a cache."""
    genuine, forged = folder / "genuine", folder / "forged"
    run, trial = saved(case, tier, genuine), Trial(every)
    shutil.copytree(genuine, forged)
    data = (genuine / "cache.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    about = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["about"])
    first = about["segments"][0]
    tensors, segment = load_file(genuine / "cache.safetensors"), load_file(genuine / first)

    def altered(forge: Callable[..., None]) -> None:
        mine = copy.deepcopy(about), dict(tensors), dict(segment)
        forge(*mine)
        same = list(mine[2]) == list(segment) and all(mine[2][name] is segment[name] for name in segment)
        write(forged, *mine[:2], None if same else mine[2])
        run(forged)

    for name, forge in (*text_forgeries(about), *tensor_forgeries(tensors, 1), *tensor_forgeries(segment, 2)):
        trial(name, partial(altered, forge))
    for what, other in header_forgeries(data):
        (forged / "cache.safetensors").write_bytes(other)
        trial(f"cache.safetensors: {what}", lambda: run(forged))
    for what, other in header_forgeries((genuine / first).read_bytes()):
        write(forged, with_segment(forged, about, other), tensors)
        trial(f"{first}: {what}", lambda: run(forged))
    for file in ("cache.safetensors", first):
        for what in pipes(forged / file):
            trial(what, lambda: run(forged))
        (forged / file).unlink()
        shutil.copy(genuine / file, forged / file)
    for value in (0x00, 0x7F, 0xFF):
        blocks = {name: part.clone() for name, part in segment.items()}
        for name, part in blocks.items():
            if name.endswith((".blocks", ".packed")):
                part.view(-1).view(torch.uint8).fill_(value)
        write(forged, about, tensors, blocks)
        trial(f"blocks full of {value}", lambda: run(forged))
    return trial


def main(folder: Path, every: int, cases: Iterable[str]) -> None:
    """Try every so manieth forgery of some cases; raise what was wrong."""
    for case in cases:
        print(f"--- {case}", flush=True)
        (folder / case).mkdir()
        caches(*case.rsplit("-", 1), folder / case, every).end()
