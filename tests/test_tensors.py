"""Tensors of safetensors files, against the library's own reading."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_offline.extract import tensors
from dflash_offline.extract.tensors import DTYPES, read_tensors


def write_all(path: Path) -> dict[str, Tensor]:
    """Every type and the odd shapes; those of a byte an item leave the others unaligned."""
    generator = torch.Generator().manual_seed(0)
    wanted = {
        f"{name}.{number}": torch.randn(shape, generator=generator).to(dtype)
        for number, shape in enumerate([(3, 5, 7), (), (0, 4), (1,), (257, 129)])
        for name, dtype in DTYPES.items()
    }
    save_file(wanted, path, {"format": "pt"})
    return wanted


def check_equal(path: Path, device: str) -> None:
    wanted = load_file(path)
    names = list(reversed(wanted))[1:]
    found = dict(read_tensors(path, names, device))
    assert list(found) == names and all(t.device.type == device for t in found.values())
    for name in names:
        got, want = found[name].cpu(), wanted[name]
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert got.reshape(-1).view(torch.uint8).equal(want.reshape(-1).view(torch.uint8))


def test_tensors_are_those_of_the_library(tmp_path: Path) -> None:
    write_all(tmp_path / "a.safetensors")
    check_equal(tmp_path / "a.safetensors", "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_reach_the_gpu_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_PIECE", 1 << 10)
    write_all(tmp_path / "a.safetensors")
    check_equal(tmp_path / "a.safetensors", "cuda")


def test_files_that_are_not_what_their_header_says_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_all(path)
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    name = "F32.0"
    for changed, error, message in (
        (whole[:-1], ValueError, "a.safetensors has .* bytes, its header says"),
        (whole + b"x", ValueError, "a.safetensors has .* bytes, its header says"),
        (whole[:5], struct.error, "8 bytes"),
        (whole[: 8 + length // 2], ValueError, "line 1 column"),
        (changed_header(header, name, shape=[3, 5, 8]) + whole[8 + length :], ValueError, r"F32\.0 has 420 bytes for"),
        (changed_header(header, name, dtype="F99") + whole[8 + length :], KeyError, "F99"),
    ):
        path.write_bytes(changed)
        with pytest.raises(error, match=message):
            dict(read_tensors(path, [name], "cpu"))
    path.write_bytes(whole)
    with pytest.raises(KeyError, match="other"):
        dict(read_tensors(path, ["other"], "cpu"))


def changed_header(header: dict[str, dict[str, object]], name: str, **change: object) -> bytes:
    raw = json.dumps({**header, name: {**header[name], **change}}).encode()
    return struct.pack("<Q", len(raw)) + raw
